"""Checkpoints and patch files on disk: compare, write, inspect and apply them.

Begin with checkpoint.py, then patch_file.py.
"""
