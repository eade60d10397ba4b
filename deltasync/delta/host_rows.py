"""The sparse rows of a bucket side by side: host code goes over all of them at once, not by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Flat, Live, integer_dtype
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.columns import Ints, cut
from deltasync.delta.kernels.host import unsigned
from deltasync.errors import InvalidIndices
from deltasync.wire.digest import GOLDEN_RATIO, digest_pieces
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import RowKind, Rows

_ABSENT, _ALONE = -1, -2


class Lines:
    """Live weights, and where they lie in host storage, of which many may share a piece.

    Attributes:
        flats: The live parameters that are held, by number in the layout.
        storages: Their storages in host memory, each as one line of integers.
        number: int64[parameters]: in which of them each lies; less than 0 for one that is not held
            here, or has to be written by itself: in parts, strided, or not in host memory.
        offset: int64[parameters]: where it begins there, in elements.
    """

    def __init__(self, flats: Mapping[int, Live], num_parameters: int) -> None:
        self.flats = flats
        self.storages: list[Flat] = []
        self.number = np.full(num_parameters, _ABSENT)
        self.offset = np.zeros(num_parameters, np.int64)
        known: dict[tuple[int, int], int] = {}
        for parameter, flat in flats.items():
            if not isinstance(flat, Flat) or not flat.is_contiguous or not flat.line.is_cpu:
                self.number[parameter] = _ALONE
                continue
            place = flat.line.untyped_storage().data_ptr(), flat.dtype.item_size
            if place not in known:
                known[place] = len(self.storages)
                self.storages.append(_whole(flat))
            self.number[parameter] = known[place]
            self.offset[parameter] = flat.line.storage_offset()

    def sparse(self, bucket: ReadBucket) -> NDArray[np.bool_]:
        """bool[rows]: which rows can be taken side by side."""
        if not bucket.payload.is_cpu:
            return np.zeros(len(bucket.rows), np.bool_)
        here = self.number[bucket.rows["parameter"]] != _ALONE
        return np.asarray(here & (bucket.rows["kind"] == RowKind.SPARSE))


@dataclass(frozen=True, slots=True)
class HostRows:
    """Sparse rows of one item size, those of a line one after another.

    Attributes:
        rows: The patch table's.
        cuts: int64[rows + 1], where the elements of each begin, and n.
        indices: int32[n], relative to the start of their row.
        bits: int[n].
        line: int64[rows]; less than 0 for rows that are not held here, which come first.
        begin: int64[rows], where each begins in its line.
    """

    rows: Rows
    cuts: Ints
    indices: Tensor
    bits: Tensor
    line: Ints
    begin: Ints

    @classmethod
    def of(cls, bucket: ReadBucket, where: Ints, lines: Lines) -> HostRows:
        """Copy rows `where` out of a payload, in the order in which they lie in memory."""
        parameter = bucket.rows["parameter"][where]
        line = lines.number[parameter]
        begin = lines.offset[parameter] + bucket.rows["start"][where].astype(np.int64)
        order = np.lexsort((begin, line))
        where, rows = where[order], bucket.rows[where[order]]
        payload = bucket.payload.numpy()
        cuts = np.concatenate(([0], np.cumsum(rows["count"], dtype=np.int64)))
        indices = _joined(payload, bucket.index_at[where], rows["index_bytes"]).view(torch.int32)
        dtype = integer_dtype(bucket.specs[int(parameter[0])].dtype)
        bits = _joined(payload, bucket.value_at[where], rows["value_bytes"]).view(dtype)
        return cls(rows, cuts, indices, bits, line[order], begin[order])

    def check(self, specs: tuple[ParameterSpec, ...]) -> None:
        """Raises InvalidIndices unless each row's indices rise strictly within its span."""
        indices = self.indices.numpy()
        rises = indices[1:] > indices[:-1]
        rises[self.cuts[1:-1] - 1] = True  # from one row to the next they need not
        first, last = indices[self.cuts[:-1]], indices[self.cuts[1:] - 1]
        good = (first >= 0) & (last < self.rows["span"].astype(np.int64))
        if good.all() and rises.all():
            return
        element = int(np.argmin(rises)) if good.all() else int(self.cuts[good.argmin()])
        name = specs[self.parameter_at(element)].name
        raise InvalidIndices(f"{name}: indices out of range, unsorted or repeated")

    def held(self) -> HostRows:
        """Those that are held here."""
        row = int(self.line.searchsorted(0))
        at = int(self.cuts[row])
        columns = self.rows[row:], self.cuts[row:] - at, self.indices[at:], self.bits[at:]
        return HostRows(*columns, self.line[row:], self.begin[row:])

    def positions(self) -> Tensor:
        """int64[n]: where the elements lie in their lines."""
        positions = np.repeat(self.begin, np.diff(self.cuts))
        positions += self.indices.numpy()
        return torch.from_numpy(positions)

    def parameter_at(self, element: int) -> int:
        """Which parameter an element belongs to."""
        return int(self.rows["parameter"][self.cuts.searchsorted(element, "right") - 1])

    def by_line(self) -> Iterator[tuple[int, slice]]:
        """(line, which elements lie there)."""
        first = np.flatnonzero(np.diff(self.line, prepend=-1))
        bounds = np.append(self.cuts[first], self.cuts[-1]).tolist()
        for line, (low, high) in zip(self.line[first].tolist(), pairwise(bounds), strict=True):
            yield line, slice(low, high)


@dataclass(frozen=True, slots=True)
class HostPieces:
    """The rows cut where chunks end, to be digested.

    Attributes:
        rows: What is cut.
        cuts: int64[pieces + 1], where the elements of each begin, and n. None is empty.
        keys: uint64[pieces]: the digest keys of their first positions.
        place: int64[pieces]: the chunks that they belong to, in a ledger.
    """

    rows: HostRows
    cuts: Ints
    keys: NDArray[np.uint64]
    place: Ints

    @classmethod
    def of(
        cls, rows: HostRows, *, chunk_numel: int, first: Ints, keys: NDArray[np.uint64]
    ) -> HostPieces:
        """Cut. `first` and `keys` are the ledger's columns by parameter."""
        start, parameter = rows.rows["start"].astype(np.int64), rows.rows["parameter"]
        chunk = start // chunk_numel
        last = (start + rows.rows["span"].astype(np.int64) - 1) // chunk_numel
        row, nth = cut(last - chunk + 1, 1)
        cuts = np.append(rows.cuts[row], rows.cuts[-1])
        chunk = chunk[row] + nth
        indices = rows.indices.numpy()
        for piece in np.flatnonzero(nth).tolist():
            low, high = rows.cuts[row[piece] : row[piece] + 2]
            bound = np.int32(chunk[piece] * chunk_numel - start[row[piece]])
            cuts[piece] += indices[low:high].searchsorted(bound)
        filled = np.flatnonzero(np.diff(cuts))
        cuts, row, chunk = np.append(cuts[filled], cuts[-1]), row[filled], chunk[filled]
        begin = start[row].view(np.uint64) * np.uint64(GOLDEN_RATIO)
        return cls(rows, cuts, keys[parameter[row]] + begin, first[parameter[row]] + chunk)

    def digests(self, bits: Tensor) -> NDArray[np.uint64]:
        """uint64[pieces], if the elements have int[n] `bits`."""
        return digest_pieces(self.rows.indices.numpy(), unsigned(bits), self.keys, self.cuts)


def _whole(flat: Flat) -> Flat:
    """All of the storage that a contiguous tensor lies in."""
    numel = flat.line.untyped_storage().nbytes() // flat.dtype.item_size
    line = flat.line.as_strided((numel,), (1,), 0)
    return Flat(line, flat.dtype, line, is_contiguous=True)


def _joined(payload: NDArray[np.uint8], begin: Ints, num_bytes: NDArray[np.uint64]) -> Tensor:
    """uint8[n]: these pieces of a payload, one after another."""
    bounds = np.stack((begin, begin + num_bytes.astype(np.int64)), axis=1)
    return torch.from_numpy(np.concatenate([payload[a:b] for a, b in bounds.tolist()]))
