"""Tensors: what changed, how it is packed, and how it is staged and written.

Begin with backend.py, which chooses host/ or batched/; then policy.py and bits.py.
"""
