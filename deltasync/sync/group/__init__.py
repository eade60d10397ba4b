"""A trainer with several ranks: each compares and sends what it holds.

Begin with group.py (on rank 0) and rank.py (on the others).
"""
