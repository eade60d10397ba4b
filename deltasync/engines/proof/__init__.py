"""Proves, before the first delta, that updates reach everything that an engine computes with.

Begin with proved.py, then proving.py and reach.py.
"""
