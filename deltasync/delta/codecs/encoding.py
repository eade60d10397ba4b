"""Payloads on their way out: which row gets which codec.

docs/wire-format.md, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.codecs.base import Bits, Block, Indices, Needs, SparseRow, unsigned_dtype
from deltasync.delta.codecs.gap import encode_gaps, encode_steps
from deltasync.delta.codecs.old import OldRows
from deltasync.delta.codecs.registry import codec_of, digest_at, digest_run
from deltasync.wire.codecs import IndexCodec, ValueCodec
from deltasync.wire.coded import CodedPayload
from deltasync.wire.table import ROW, Entry, RowKind, Rows, block_offsets

_NO_INDICES = np.empty(0, np.int32)
_DENSE = RowKind.DENSE  # Enum looks up slowly


def encode_payload(
    payload: NDArray[np.uint8],
    num_rows: int,
    old: OldRows,
    codec: IndexCodec,
) -> CodedPayload:
    """The coded form of a payload. It may be longer: then send the payload itself.

    Args:
        payload: uint8[n], as section 3 has it, at an address that 8 divides; only read.
        num_rows: Rows of its table.
        old: What its rows change.
        codec: What sparse rows are coded with. A row for which that does not pay, or of which `old`
            has not what it needs, gets `gap` and `ulp`, or stays raw.
    """
    rows: Rows = payload[: num_rows * ROW.itemsize].view(ROW)
    index_at, value_at, _ = block_offsets(rows)
    chosen = list[_Chosen]()
    places = zip(rows.tolist(), index_at.tolist(), value_at.tolist(), strict=True)
    for number, (entry, at, values_at) in enumerate(places):
        row = Entry(*entry)
        index = payload[at : at + row.index_bytes]
        value = payload[values_at : values_at + row.value_bytes]
        work = _Encoding(number, row, index, value, old)
        chosen.append(work.dense() if row.kind == _DENSE else work.sparse(codec))
    coded = rows.copy()
    coded["index_codec"] = [one.index_codec for one in chosen]
    coded["value_codec"] = [one.value_codec for one in chosen]
    coded["index_bytes"] = [len(one.index) for one in chosen]
    coded["value_bytes"] = [len(one.value) for one in chosen]
    digests = np.array([one.digest for one in chosen], np.uint64)
    sections = b"".join(one.index for one in chosen), b"".join(one.value for one in chosen)
    return CodedPayload(coded, digests, *(np.frombuffer(one, np.uint8) for one in sections))


@dataclass(slots=True, eq=False)
class _Chosen:
    """How one row is coded."""

    index: bytes | memoryview
    value: bytes | memoryview
    index_codec: IndexCodec
    value_codec: ValueCodec = ValueCodec.RAW
    digest: int = 0


class _Encoding:
    """One row of a payload.

    Args:
        number: Its place.
        row: Its entry in the table.
        index, value: uint8[n], its raw blocks.
        old: What it changes.
    """

    def __init__(
        self,
        number: int,
        row: Entry,
        index: Block,
        value: Block,
        old: OldRows,
    ) -> None:
        self._place = number, row.parameter
        self._start, self._span = row.start, row.span
        self._spec, self._old = old.spec(*self._place), old
        self._raw = index, value
        self._indices: Indices = index.view(np.int32)
        self._new: Bits = value.view(unsigned_dtype(self._spec.dtype))

    def dense(self) -> _Chosen:
        """The steps of all elements, if the old bits are known and that is no longer."""
        raw = _Chosen(b"", self._raw[1].data, IndexCodec.NONE)
        old = self._old.run(*self._place, self._start, self._start + self._span)
        if old is None:
            return raw
        steps = encode_steps(self._row(_NO_INDICES, old[0]))
        if len(steps) > len(raw.value):
            return raw
        digest = digest_run(self._spec, self._start, old[0])
        return _Chosen(b"", steps, IndexCodec.NONE, ValueCodec.ULP, digest)

    def sparse(self, codec: IndexCodec) -> _Chosen:
        """By `codec` if that is possible and pays, otherwise by `gap` and `ulp`, or raw."""
        if codec is not IndexCodec.GAP:
            found = self._by(codec)
            if found is not None:
                return found
        found = _Chosen(self._raw[0].data, self._raw[1].data, IndexCodec.RAW)
        gaps = encode_gaps(self._indices)
        if len(gaps) <= len(found.index):
            found.index, found.index_codec = gaps, IndexCodec.GAP
        old = self._old.at(*self._place, self._start, self._indices)
        if old is not None:
            steps = encode_steps(self._row(self._indices, old[0]))
            if len(steps) <= len(found.value):
                found.value, found.value_codec = steps, ValueCodec.ULP
                found.digest = digest_at(self._spec, self._start, self._indices, old[0])
        return found

    def _by(self, codec: IndexCodec) -> _Chosen | None:
        by, stop = codec_of(codec), self._start + self._span
        if by.needs is Needs.SPAN:
            old = self._old.run(*self._place, self._start, stop)
        else:
            old = self._old.at(*self._place, self._start, self._indices)
        if old is None:
            return None
        index, value = by.encode(self._row(self._indices, old[0]))
        if len(index) + len(value) > len(self._raw[0]) + len(self._raw[1]):
            return None
        before = old[0][self._indices] if by.needs is Needs.SPAN else old[0]
        digest = digest_at(self._spec, self._start, self._indices, before)
        return _Chosen(index, value, by.index_codec, by.value_codec, digest)

    def _row(self, indices: Indices, old: Bits) -> SparseRow:
        return SparseRow(indices, self._new, old, self._span, self._spec.dtype)
