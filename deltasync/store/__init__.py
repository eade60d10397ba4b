"""Versions in object stores: published once, fetched by whoever comes, whenever it comes.

Begin with writer.py, which makes versions visible; docs/store.md has layout and rules. To import
this package adds the codec `class` to those that payloads are read and written with.
"""

from deltasync.store.classes import codec as codec
