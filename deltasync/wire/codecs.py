"""Codecs of indices and values: closed tables whose ids are never re-used.

docs/wire-format.md, section 4. An id that is not in a table is a damaged or newer
frame, not a plug-in.
"""

from __future__ import annotations

from enum import IntEnum

RAW = 1


class IndexCodec(IntEnum):
    """How the positions of a sparse row are written. Dense rows have none.

    Members stand in the order of their numbers, from 0 on: decoding relies on it.
    """

    NONE = 0
    RAW = RAW  # int32 each
    GAP = 2  # how many are unchanged before each that is not
    BLOCK = 3  # offsets of a fixed width in independent blocks
    CLASS = 4  # ranks among the elements whose old values are of one class


class ValueCodec(IntEnum):
    """How values are written."""

    RAW = RAW  # the elements' bytes
    ULP = 2  # a byte that says how far the new value is from the old one
    CLASS = 3  # the same in few bits, by the class of the old value
    BLOCK = 4  # the same in few bits of a fixed width


INDEX_ITEM_BYTES = 4  # of the raw index codec

SPARSE_CODECS: tuple[tuple[IndexCodec, ValueCodec], ...] = (
    (IndexCodec.RAW, ValueCodec.RAW),
    (IndexCodec.RAW, ValueCodec.ULP),
    (IndexCodec.GAP, ValueCodec.RAW),
    (IndexCodec.GAP, ValueCodec.ULP),
    (IndexCodec.BLOCK, ValueCodec.BLOCK),
    (IndexCodec.CLASS, ValueCodec.CLASS),
)
"""What a sparse row of a coded payload may have. A payload that is not coded has the first."""

DENSE_CODECS: tuple[tuple[IndexCodec, ValueCodec], ...] = (
    (IndexCodec.NONE, ValueCodec.RAW),
    (IndexCodec.NONE, ValueCodec.ULP),
)
"""The same of a dense row."""
