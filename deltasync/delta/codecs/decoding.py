"""Payloads on their way in: exactly what was coded, or an error before anything is written.

docs/wire-format.md, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.codecs.base import (
    Bits,
    Block,
    CodedRow,
    Indices,
    Needs,
    RowCodec,
    unsigned_dtype,
)
from deltasync.delta.codecs.gap import decode_gaps, decode_steps
from deltasync.delta.codecs.old import Old, OldRows
from deltasync.delta.codecs.registry import codec_of, digest_at, digest_run
from deltasync.delta.kernels import host
from deltasync.errors import (
    InvalidIndices,
    InvalidTable,
    ProtocolViolation,
    TruncatedFrame,
    WireError,
    WrongBase,
)
from deltasync.wire.codecs import IndexCodec, ValueCodec
from deltasync.wire.coded import CodedPayload, CodedTable
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import Entry, Ints, RowKind, Rows, read_table

_NO_INDICES = np.empty(0, np.int32)
_INDEX_CODECS = tuple(IndexCodec)  # by number
_RAW_INDEX, _RAW, _ULP = IndexCodec.RAW, ValueCodec.RAW, ValueCodec.ULP  # Enum looks up slowly
_DENSE = RowKind.DENSE


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """The payload that a coded one stands for.

    Attributes:
        rows, index_at, value_at: Its table, and where blocks begin: see `read_table`.
        payload: uint8[n].
    """

    rows: Rows
    index_at: Ints
    value_at: Ints
    payload: Tensor


class Decoder(Protocol):
    """Decodes payloads by weights on a device."""

    def decode(
        self,
        data: Tensor,
        num_rows: int,
        raw_bytes: int,
        *,
        numels: NDArray[np.uint64],
        item_sizes: NDArray[np.uint64],
        after: tuple[int, int],
    ) -> Decoded | None:
        """The payload that a coded one stands for, on that device; None if the host has to decode.

        Accepts and refuses what `decode_payload` does. Takes memory of up to five times `raw_bytes`
        in all.

        Args:
            data: uint8[n], the coded payload as it came, on any device.
            num_rows, raw_bytes, numels, item_sizes: As of `decode_payload`.
            after: As of `read_table`.

        Raises:
            WireError: A rule of the wire format is broken.
            WrongBase: A row was made from other old values.
        """
        ...


def decode_payload(
    data: memoryview,
    num_rows: int,
    raw_bytes: int,
    old: OldRows,
    *,
    numels: NDArray[np.uint64],
    item_sizes: NDArray[np.uint64],
) -> NDArray[np.uint8]:
    """uint8[raw_bytes]: the payload that a coded one stands for.

    Takes memory of about twice `raw_bytes`, and of one row's span if its codec needs that.

    Args:
        data: The coded payload as it came.
        num_rows: Rows of its table.
        raw_bytes: Length of the result.
        old: What its rows change.
        numels, item_sizes: uint64[parameters], elements, and bytes of each, of the layout.

    Raises:
        WireError: A rule of the wire format is broken.
        WrongBase: A row was made from other old values.
        ProtocolViolation: A row cannot be decoded by a receiver that holds a part of it.
    """
    coded = CodedPayload.from_bytes(data, num_rows=num_rows, raw_bytes=raw_bytes)
    rows, index_at, value_at = checked_rows(coded, raw_bytes, numels, item_sizes)
    payload, table = np.zeros(raw_bytes, np.uint8), rows.view(np.uint8)
    payload[: len(table)] = table
    index_cuts, value_cuts, *places = (
        numbers.tolist() for numbers in (*coded.blocks(), index_at, value_at)
    )
    entries, digests = coded.rows.tolist(), coded.digests.tolist()
    for n in range(num_rows):
        index = coded.index[index_cuts[n] : index_cuts[n + 1]]
        value = coded.value[value_cuts[n] : value_cuts[n + 1]]
        work = _Decoding(n, Entry(*entries[n]), digests[n], index, value, old)
        for begins, array in zip(places, work.decoded(), strict=True):
            payload[begins[n] : begins[n] + array.nbytes] = array.view(np.uint8)
    return payload


def checked_rows(
    coded: CodedTable,
    raw_bytes: int,
    numels: NDArray[np.uint64],
    item_sizes: NDArray[np.uint64],
    after: tuple[int, int] = (0, 0),
) -> tuple[Rows, Ints, Ints]:
    """The table that a coded payload stands for, as `read_table` has it. Raises WireError."""
    parameters = coded.rows["parameter"]
    if not (parameters < len(numels)).all():
        raise InvalidTable("a row names a parameter that the layout has not")
    return read_table(
        coded.raw_rows(item_sizes[parameters]).view(np.uint8),
        payload_bytes=raw_bytes,
        numels=numels,
        item_sizes=item_sizes,
        after=after,
    )


def wrong_base(name: str) -> WrongBase:
    """Of a row of this parameter that was made from other old values."""
    return WrongBase(
        f"{name}: the delta was made from other values than those held here, or is damaged; "
        "rejoin for a full sync"
    )


def bad_indices(spec: ParameterSpec) -> InvalidIndices:
    """Of a row that breaks rule W14."""
    return InvalidIndices(f"{spec.name}: indices out of range, unsorted or repeated")


class _Decoding:
    """One row of a coded payload, whose entry in the table was checked.

    Args:
        number: Its place.
        row: Its entry.
        digest: Of the old values that it was made from.
        index, value: uint8[n], its blocks: arbitrary bytes.
        old: What it changes.
    """

    def __init__(
        self,
        number: int,
        row: Entry,
        digest: int,
        index: Block,
        value: Block,
        old: OldRows,
    ) -> None:
        self._place = number, row.parameter
        self._start, self._span = row.start, row.span
        self._digest, self._is_dense = digest, row.kind == _DENSE
        self._index_codec = _INDEX_CODECS[row.index_codec]
        self._value_codec = row.value_codec
        self._spec, self._old = old.spec(*self._place), old
        self._kind = unsigned_dtype(self._spec.dtype)
        self._row = CodedRow(index, value, row.count, self._span, self._spec.dtype)

    def decoded(self) -> tuple[Indices, Bits]:
        """(int32[count] indices, or none of a dense row; unsigned[count] new bits)."""
        if self._is_dense:
            return _NO_INDICES, self._dense()
        if self._value_codec not in (_RAW, _ULP):
            return self._by_pair()
        indices = self._checked(self._indices())
        if self._value_codec == _RAW:
            return indices, self._raw(self._row.value, self._kind)
        old = self._old.at(*self._place, self._start, indices)
        if old is None:  # of what is not held here, any value will do
            return indices, np.zeros(len(indices), self._kind)
        values = decode_steps(self._row, old[0])
        self._check_base(old, indices)
        return indices, values

    def _dense(self) -> Bits:
        if self._value_codec == _RAW:
            return self._raw(self._row.value, self._kind)
        if len(self._row.value) < self._span:  # before memory is taken
            raise TruncatedFrame(f"{self._spec.name}: fewer steps than elements")
        old = self._old.run(*self._place, self._start, self._start + self._span)
        if old is None:
            return np.zeros(self._span, self._kind)
        self._check_base(old, None)
        return decode_steps(self._row, old[0])

    def _indices(self) -> Indices:
        if self._index_codec is _RAW_INDEX:
            return self._raw(self._row.index, np.dtype("<i4"))
        return decode_gaps(self._row.index, self._row.count, self._row.span)

    def _by_pair(self) -> tuple[Indices, Bits]:
        """By a codec whose index and value block belong together."""
        codec = codec_of(self._index_codec)
        row, span = self._row, None
        if codec.needs is Needs.SPAN:
            span = self._old.run(*self._place, self._start, self._start + self._span)
            if span is None:
                return np.arange(row.count, dtype=np.int32), np.zeros(row.count, self._kind)
            if not span[1]:
                raise ProtocolViolation(
                    f"{self._spec.name}: codec {self._index_codec.name.lower()} needs all of it, "
                    "and a part is held here; send with compression='gap'"
                )
            row = CodedRow(row.index, row.value, row.count, row.span, row.dtype, span[0])
        old: Old | None
        if span is None:
            indices = self._checked(codec.indices(row))
            old = self._old.at(*self._place, self._start, indices)
        else:
            indices = self._by_span(codec, row)
            old = span[0][indices], True
        if old is None:
            return indices, np.zeros(row.count, self._kind)
        self._check_base(old, indices)
        return indices, codec.values(row, old[0])

    def _by_span(self, codec: RowCodec, row: CodedRow) -> Indices:
        """The indices of a block that nobody can read who holds other old values."""
        try:
            return self._checked(codec.indices(row))
        except WireError as error:
            raise self._wrong_base() from error

    def _raw(self, block: Block, kind: np.dtype[Any]) -> NDArray[Any]:
        if len(block) != self._row.count * kind.itemsize:
            raise TruncatedFrame(f"{self._spec.name}: a raw block of {len(block)} bytes")
        return block.copy().view(kind)

    def _checked(self, indices: Indices) -> Indices:
        if not host.is_increasing(torch.from_numpy(indices), self._span):
            raise bad_indices(self._spec)
        return indices

    def _check_base(self, old: Old, indices: Indices | None) -> None:
        """Rule W31, if all of the old values are held here."""
        bits, is_whole = old
        if not is_whole:
            return
        if indices is None:
            self._compare(digest_run(self._spec, self._start, bits))
        else:
            self._compare(digest_at(self._spec, self._start, indices, bits))

    def _compare(self, found: int) -> None:
        if found != self._digest:
            raise self._wrong_base()

    def _wrong_base(self) -> WrongBase:
        return wrong_base(self._spec.name)
