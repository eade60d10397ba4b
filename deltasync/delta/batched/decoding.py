"""Coded payloads decoded in the memory of the device where the weights are.

docs/wire-format.md, section 4. What the host checks in `codecs.decoding` is checked here too,
before anything is handed out: arbitrary bytes are a typed error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.old import SparseRows, read_old
from deltasync.delta.batched.weights import BatchedWeights, Numbers, device_of, upload
from deltasync.delta.bits import Live, integer_dtype
from deltasync.delta.codecs.decoding import Decoded, bad_indices, checked_rows, wrong_base
from deltasync.delta.codecs.device_base import Checks, DeviceRows
from deltasync.delta.codecs.device_blocks import read_indices, read_values
from deltasync.delta.codecs.device_tiles import Copies, begins_of
from deltasync.delta.digests import Ints
from deltasync.errors import TruncatedFrame
from deltasync.wire.codecs import INDEX_ITEM_BYTES, IndexCodec, ValueCodec
from deltasync.wire.coded import HEADER_BYTES, ROW_BYTES, CodedTable, Lengths
from deltasync.wire.table import RowKind

Bools = NDArray[np.bool_]


class DeviceDecoder:
    """Decodes payloads by live weights on one device; see `Decoder`.

    A payload that a host has compressed or coded by other codecs is left to the host.

    Args:
        weights: Where they lie.
        flats: The same, by parameter.
    """

    def __init__(self, weights: BatchedWeights, flats: Mapping[int, Live]) -> None:
        self.weights, self._flats = weights, flats

    @cached_property
    def is_held(self) -> Bools:
        """bool[parameters]: of which anything is held."""
        found = np.zeros(len(self.weights.ledger.specs), np.bool_)
        found[list(self._flats)] = True
        return found

    @cached_property
    def is_whole(self) -> Bools:
        """bool[parameters]: of which everything is held."""
        found = self.is_held.copy()
        for number, flat in self._flats.items():
            found[number] = flat.held(0, 0) is None
        return found

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
        """Waits for the device twice, and once for each dtype."""
        device = self.weights.device
        with device_of(device):
            head = Numbers(data[: HEADER_BYTES + ROW_BYTES * num_rows]).read()
            lengths = Lengths.of(head.data)
            lengths.check(len(data), num_rows=num_rows, raw_bytes=raw_bytes)
            if not lengths.are_stored:
                return None
            table = CodedTable.read(head[HEADER_BYTES:], lengths)
            found = checked_rows(table, raw_bytes, numels, item_sizes, after)
            if not self._can_decode(table):
                return None
            payload = torch.zeros(raw_bytes, dtype=torch.uint8, device=device)
            decoded = Decoded(*found, payload)
            _Decoding(self, table, lengths, data.to(device), decoded).decode()
            return decoded

    def _can_decode(self, table: CodedTable) -> bool:
        codes = np.unique(table.rows["index_codec"].astype(int) << 8 | table.rows["value_codec"])
        known = [IndexCodec.NONE << 8 | ValueCodec.RAW, IndexCodec.RAW << 8 | ValueCodec.RAW]
        known.append(IndexCodec.BLOCK << 8 | ValueCodec.BLOCK)
        return bool(np.isin(codes, known).all())


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rows of one dtype that are coded in blocks, all held or none.

    Attributes:
        which: int64[k], the rows.
        rows: What is known of them.
        index, value: uint8[n] on the device, their blocks side by side.
        old: int[n], their old bits; 0 where they are not held.
    """

    which: Ints
    rows: DeviceRows
    index: Tensor
    value: Tensor
    old: Tensor


class _Decoding:
    """One payload on its way in, whose table was checked.

    Args:
        decoder: Whose weights.
        table: Its table.
        lengths: Its sections, which are stored as they are.
        data: uint8[n] on the device, the coded payload.
        decoded: What it stands for: zeros so far.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        table: CodedTable,
        lengths: Lengths,
        data: Tensor,
        decoded: Decoded,
    ) -> None:
        self._decoder, self._decoded, self._table = decoder, decoded, table
        self._device, self._data = data.device, data
        self._number, self._span, self._count = (
            decoded.rows[name].astype(np.int64) for name in ("parameter", "span", "count")
        )
        self._is_held = decoder.is_held[self._number]
        self._index_bytes, self._value_bytes = (
            table.rows[name].astype(np.int64) for name in ("index_bytes", "value_bytes")
        )
        sections = data.data_ptr() + HEADER_BYTES + lengths.full[0]
        self._index_from = sections + begins_of(self._index_bytes)
        self._value_from = sections + lengths.full[1] + begins_of(self._value_bytes)
        self._index_to = decoded.payload.data_ptr() + decoded.index_at
        self._value_to = decoded.payload.data_ptr() + decoded.value_at
        self._checks = Checks()

    def decode(self) -> None:
        """Fill the payload in. Raises WireError, WrongBase."""
        (table,) = upload([self._decoded.rows.view(np.int64)], self._device)
        self._decoded.payload[: table.nbytes].view(torch.int64).copy_(table)
        groups = self._split()
        self._locate(groups)
        self._read_old(groups)
        copies, kept = Copies(), list[Tensor]()
        for group in groups:
            which, rows, size = group.which, group.rows, group.rows.dtype.item_size
            if self._is_held[which[0]]:
                lengths = self._value_bytes[which]
                new = read_values(rows, group.value, lengths, group.old, self._checks)
                begins = new.data_ptr() + size * begins_of(rows.counts)
                copies.add(begins, self._value_to[which], size * rows.counts)
                kept.append(new)
        copies.launch(self._device)
        self._checks.finish()

    def _split(self) -> list[_Group]:
        """Bring blocks of each dtype together, and raw ones where they belong."""
        rows, raw, copies = self._table.rows, self._decoded.rows, Copies()
        for name, codec, taken, sources, targets in (
            ("index_bytes", "index_codec", self._index_bytes, self._index_from, self._index_to),
            ("value_bytes", "value_codec", self._value_bytes, self._value_from, self._value_to),
        ):
            is_raw = rows[codec] == raw[codec]
            if (rows[name] != raw[name])[is_raw].any():
                raise TruncatedFrame("a raw block is not as long as its row")
            copies.add(sources[is_raw], targets[is_raw], taken[is_raw])
        kinds = self._decoder.weights.dtype_codes[self._number] << 1 | self._is_held
        is_coded = rows["value_codec"] != ValueCodec.RAW
        groups = list[_Group]()
        for kind in np.unique(kinds[is_coded]):
            which = np.flatnonzero(is_coded & (kinds == kind))
            group = self._group(which)
            groups.append(group)
            lengths = self._index_bytes[which]
            copies.add(
                self._index_from[which], group.index.data_ptr() + begins_of(lengths), lengths
            )
            lengths = self._value_bytes[which]
            copies.add(
                self._value_from[which], group.value.data_ptr() + begins_of(lengths), lengths
            )
        copies.launch(self._device)
        return groups

    def _group(self, which: Ints) -> _Group:
        dtype = self._decoder.weights.ledger.specs[self._number[which[0]]].dtype
        index, value = (
            torch.empty(int(taken[which].sum()), dtype=torch.uint8, device=self._device)
            for taken in (self._index_bytes, self._value_bytes)
        )
        total = int(self._count[which].sum()) if self._is_held[which[0]] else 0
        old = torch.zeros(total, dtype=integer_dtype(dtype), device=self._device)
        rows = DeviceRows(self._count[which], self._span[which], dtype)
        return _Group(which, rows, index, value, old)

    def _locate(self, groups: list[_Group]) -> None:
        """Write the indices of coded rows."""
        copies, kept = Copies(), list[Tensor]()
        for group in groups:
            which, counts = group.which, group.rows.counts
            lengths = self._index_bytes[which]
            indices = read_indices(group.rows, group.index, lengths, self._checks)
            begins = indices.data_ptr() + INDEX_ITEM_BYTES * begins_of(counts)
            copies.add(begins, self._index_to[which], INDEX_ITEM_BYTES * counts)
            kept.append(indices)
        copies.launch(self._device)

    def _read_old(self, groups: list[_Group]) -> None:
        """Read what is changed; have indices checked, and that it is what the sender had."""
        raw, is_read = self._decoded.rows, np.zeros(len(self._number), np.bool_)
        old_at = np.zeros(len(self._number), np.int64)
        for group in groups:
            which = group.which
            is_read[which] = self._is_held[which]
            size = group.rows.dtype.item_size
            old_at[which] = group.old.data_ptr() + size * begins_of(group.rows.counts)
        rows = SparseRows(
            number=self._number,
            start=raw["start"].astype(np.int64),
            span=self._span,
            count=np.where(raw["kind"] == RowKind.SPARSE, self._count, 0),
            indices_at=self._index_to,
            old_at=old_at,
            is_read=is_read,
        )
        is_compared = is_read & self._decoder.is_whole[self._number]
        specs = self._decoder.weights.ledger.specs

        def look(found: Ints) -> None:
            digests, bad = np.split(found, 2)
            if bad.any():
                raise bad_indices(specs[self._number[np.flatnonzero(bad)[0]]])
            differ = is_compared & (digests.view(np.uint64) != self._table.digests)
            if differ.any():
                raise wrong_base(specs[self._number[np.flatnonzero(differ)[0]]].name)

        self._checks.add(read_old(self._decoder.weights, rows), look)
