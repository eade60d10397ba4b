"""The codec `class`: positions and steps by the exponents of the old values.

An element is the likelier to change, and changes by the more steps, the smaller it is: each
exponent has a density and a distribution of its own. The old values are at both ends, so that the
exponents cost nothing. Both ends must go over all old values of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltasync.delta.codecs import steps
from deltasync.delta.codecs.base import Bits, CodedRow, Indices, Needs, SparseRow
from deltasync.delta.codecs.known import ROW_CODECS
from deltasync.store.classes import positions, values
from deltasync.wire.codecs import IndexCodec, ValueCodec


class ClassCodec:
    """Codes rows by classes of their old values; see `RowCodec`."""

    index_codec = IndexCodec.CLASS
    value_codec = ValueCodec.CLASS
    needs = Needs.SPAN

    def encode(self, rows: Sequence[SparseRow]) -> list[tuple[bytes, bytes]]:
        """(index block, value block) of each row; `old` has the bits of the whole span."""
        return [_encoded(row) for row in rows]

    def indices(self, rows: Sequence[CodedRow]) -> list[Indices]:
        """int32[count] for each row. Raises WireError."""
        return [positions.decode(row.index, row.count, _old(row), row.dtype) for row in rows]

    def values(
        self, rows: Sequence[CodedRow], indices: Sequence[Indices], old: Sequence[Bits]
    ) -> list[Bits]:
        """unsigned[count] for each row. Raises WireError."""
        found = []
        for row, before in zip(rows, old, strict=True):
            zigzag = values.decode(row.value, before, row.dtype)
            found.append(steps.stepped(zigzag, before, row.dtype))
        return found


def _encoded(row: SparseRow) -> tuple[bytes, bytes]:
    before = row.old[row.indices]
    zigzag = steps.zigzag(row.new, before, row.dtype)
    index = positions.encode(row.indices, row.old, row.dtype)
    return index, values.encode(zigzag, before, row.dtype)


def _old(row: CodedRow) -> Bits:
    assert row.old is not None
    return row.old


ROW_CODECS[IndexCodec.CLASS] = ClassCodec()
