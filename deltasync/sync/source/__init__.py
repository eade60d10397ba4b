"""What a sender reads: tensors with checkpoint names, their layout and their snapshot.

Begin with tensors.py, then layout.py and weights.py.
"""
