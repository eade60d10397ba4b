"""Codecs of indices and values: closed tables whose ids are never re-used.

docs/wire-format.md, section 4. An id that is not in a table is a damaged or newer
frame, not a plug-in.
"""

from __future__ import annotations

from enum import IntEnum

RAW = 1


class IndexCodec(IntEnum):
    """How the positions of a sparse row are written. Dense rows have none."""

    NONE = 0
    RAW = RAW  # int32 each
    # 2 gap, 3 block, 4 class: reserved


class ValueCodec(IntEnum):
    """How values are written."""

    RAW = RAW  # the elements' bytes
    # 2 ulp, 3 class: reserved


INDEX_ITEM_BYTES = 4  # of the raw index codec
