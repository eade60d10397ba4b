"""Tensors: what changed, how it is packed, and how it is staged and written.

Begin with tiles.py and changes.py; then snapshot.py, which sends, and staging.py, which receives.
"""
