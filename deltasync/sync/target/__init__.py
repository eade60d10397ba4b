"""Where a receiver writes: a module, an engine's own layout, or a copy that is reloaded.

Begin with base.py, then bound.py.
"""
