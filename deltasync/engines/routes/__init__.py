"""Where an engine keeps each checkpoint element, recorded once from its own loader.

Begin with recorder.py, then learning.py.
"""
