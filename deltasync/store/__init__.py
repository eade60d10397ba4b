"""Versions in object stores: published once, fetched by whoever comes, whenever it comes.

Begin with writer.py, which makes versions visible; docs/store.md has layout and rules.
"""
