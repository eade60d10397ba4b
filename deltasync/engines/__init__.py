"""Engines that do not keep a parameter as the checkpoint has it: fused, sharded, computed weights.

Begin with routed.py, then routes/recorder.py and proof/proved.py.
"""
