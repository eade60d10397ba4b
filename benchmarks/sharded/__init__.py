"""Trainers of several ranks and engines of several, against gathering first.

Every rank runs the same cases in the same order, in a process of its own.
"""
