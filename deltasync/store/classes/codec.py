"""The codec `class`: positions and steps by the exponents of the old values.

An element is the likelier to change, and changes by the more steps, the smaller it is: each
exponent has a density and a distribution of its own. The old values are at both ends, so that the
exponents cost nothing. Both ends must go over all old values of a row.
"""

from __future__ import annotations

from deltasync.delta.codecs import steps
from deltasync.delta.codecs.base import Bits, CodedRow, Indices, Needs, SparseRow
from deltasync.delta.codecs.registry import ROW_CODECS
from deltasync.store.classes import positions, values
from deltasync.wire.codecs import IndexCodec, ValueCodec


class ClassCodec:
    """Codes a row by classes of their old values; see `RowCodec`."""

    index_codec = IndexCodec.CLASS
    value_codec = ValueCodec.CLASS
    needs = Needs.SPAN

    def encode(self, row: SparseRow) -> tuple[bytes, bytes]:
        """(index block, value block) of a row; `old` has the bits of the whole span."""
        before = row.old[row.indices]
        zigzag = steps.zigzag(row.new, before, row.dtype)
        index = positions.encode(row.indices, row.old, row.dtype)
        return index, values.encode(zigzag, before, row.dtype)

    def indices(self, row: CodedRow) -> Indices:
        """int32[count]. Raises WireError."""
        assert row.old is not None
        return positions.decode(row.index, row.count, row.old, row.dtype)

    def values(self, row: CodedRow, old: Bits) -> Bits:
        """unsigned[count]. Raises WireError."""
        return steps.stepped(values.decode(row.value, old, row.dtype), old, row.dtype)


ROW_CODECS[IndexCodec.CLASS] = ClassCodec()
