"""Versions in object stores: published once, fetched by whoever comes, whenever it comes.

Begin with keys.py and manifest.py; docs/store.md has the layout of a store and its rules. To import
this package adds the codec `class` to those that payloads are read and written with.
"""

from deltasync.store.classes import codec as codec
