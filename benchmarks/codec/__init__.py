"""Bytes and speed of codecs on the changes of a real optimization.

`pairs` makes the changes; `ours` and `shapes` encode them.
"""
