"""Which message may come when, and how one version is decided.

Begin with receiver_session.py and sender_session.py (a table for each end), then round.py.
"""
