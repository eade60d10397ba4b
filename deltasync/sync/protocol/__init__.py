"""Which message may come when, and how one version is decided.

Begin with session.py (the states of both ends), then round.py and lobby.py.
"""
