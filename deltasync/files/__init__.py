"""Checkpoints and patch files on disk: compare, write, inspect and apply them.

Begin with checkpoint.py, then patch_file.py. To import this package adds the codec `class` to those
that payloads are read and written with.
"""

from deltasync.files.classes import codec as codec
