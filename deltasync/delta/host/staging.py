"""Patches of a whole model at a receiver's host: staged, committed and undone.

What is sparse goes side by side, over all rows of a bucket at once; what lies in host memory in
one run is found by its *line*, the storage that it shares with others. The rest goes row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import INTEGERS, Flat, Live, Run, are_equal
from deltasync.delta.bucket import ReadBucket
from deltasync.delta.digests import DigestLedger, Ints, cut
from deltasync.delta.kernels.host import digest_pieces
from deltasync.delta.patch import check_indices
from deltasync.errors import DigestMismatch, InvalidIndices, LimitExceeded
from deltasync.wire.digest import GOLDEN_RATIO
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import RowKind, Rows

_BLOCK = 1 << 14  # elements written before they are read back: their lines fit the L2 cache
_ABSENT, _ALONE = -1, -2


class Staging:
    """The patches of one sync at a receiver, from checked bytes to written weights.

    Staging checks, copies and predicts while the engine serves and writes nothing; `commit`
    writes and reads back; `undo` restores. Its memory is positions, new bits and undo log.

    With `in_place`, for receivers without that memory, what is staged is written at once and
    nothing of it is kept. A bucket is checked whole before its first element is written. The engine
    must be paused. There is no undo: broken off after a write, the model is dirty.

    Attributes:
        in_place: Whether it does so.
        ledger: The digests that the weights have after `commit`.
        staged_bytes: Memory held.
    """

    def __init__(
        self,
        lines: Lines,
        ledger: DigestLedger,
        *,
        max_bytes: int | None = None,
        in_place: bool = False,
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a sync.

        Args:
            lines: The live weights that this receiver holds.
            ledger: Their digests now. Not changed.
            max_bytes: Raise LimitExceeded beyond; None when the sender's word is taken.
            in_place: Write what is staged, at once.
            writing: Called before `stage_bucket` writes in place.
        """
        self.in_place, self._writing = in_place, writing
        self._lines = lines
        self._runs: list[StagedRun] = []
        self._max_bytes = max_bytes
        self.ledger = ledger.copy()
        self.staged_bytes = 0

    def stage_bucket(self, bucket: ReadBucket) -> None:
        """Take over all its rows; their memory is copied. Raises InvalidIndices, LimitExceeded."""
        sparse = self._lines.sparse(bucket)
        item_size = self.ledger.item_sizes[bucket.rows["parameter"]] * sparse
        groups = [
            HostRows.of(bucket, np.flatnonzero(item_size == size), self._lines, int(size))
            for size in np.unique(item_size[sparse])
        ]
        alone = [] if sparse.all() else list(bucket.runs(~sparse))
        for rows in groups:
            rows.check(bucket.specs)
        for parameter, run in alone:
            check_indices(run, name=self.ledger.specs[parameter].name)
        while groups:
            self._stage_rows(groups.pop(0).held())
        for parameter, run in alone:
            for piece in self._pieces(run):
                self._stage_run(parameter, piece)

    def _stage_rows(self, rows: HostRows) -> None:
        """Take over checked rows, all of them held in `lines`."""
        positions, old = rows.positions(), torch.empty_like(rows.bits)
        staged = []
        for number, part in rows.by_line():
            line = self._lines.storages[number]
            torch.index_select(line, 0, positions[part], out=old[part])
            spec = self.ledger.specs[rows.parameter_at(part.start)]
            staged.append(StagedRun(spec, line, 0, positions[part], rows.bits[part], old[part]))
        indices, (cuts, keys, chunks) = rows.indices.numpy(), rows.pieces(self.ledger)
        change = digest_pieces(indices, rows.bits.numpy(), keys, cuts)
        change -= digest_pieces(indices, old.numpy(), keys, cuts)
        np.add.at(self.ledger.sums, chunks, change)
        self._take(staged)

    def _pieces(self, run: Run) -> Iterator[Run]:
        """A dense run in host memory by chunks, which stay in the cache from pass to pass."""
        if run.indices is not None or run.bits is None or not run.bits.is_cpu:
            yield run
            return
        for _, low, high in self.ledger.chunks(run.start, run.stop):
            yield Run(low, high - low, None, run.bits[low - run.start : high - run.start])

    def _stage_run(self, parameter: int, run: Run) -> None:
        flat, spec = self._lines.flats.get(parameter), self.ledger.specs[parameter]
        if flat is None or run.bits is None:
            return
        bits = run.bits.to(flat.line.device, copy=not self.in_place)
        positions, new = _held_of(run, bits, flat)
        if not len(new):
            return
        if positions is None:
            # What is written in place is not put back, and nobody asks for its old bits.
            old = new if self.in_place else flat.read(run.start, run.stop).clone()
            self.ledger.replace_dense(parameter, run.start, new, flat.read)
        else:
            old = flat.gather(positions)
            self.ledger.replace_sparse(parameter, positions, old, new)
        self._take([StagedRun(spec, flat, run.start, positions, new, old)])

    def _take(self, runs: list[StagedRun]) -> None:
        if self.in_place:
            if runs:
                self._writing()
            for run in runs:
                run.commit()
            return
        self.staged_bytes += sum(run.num_bytes for run in runs)
        if self._max_bytes is not None and self.staged_bytes > self._max_bytes:
            raise LimitExceeded(f"{runs[0].spec.name}: the sync is larger than its begin declared")
        self._runs += runs

    def commit(self) -> int:
        """Write everything and read it back. Returns the digest of the weights.

        Raises DigestMismatch, by name, for what is not there, and whatever a write raises; the
        caller then calls `undo`.
        """
        for run in self._runs:
            run.commit()
        return self.ledger.total

    def undo(self) -> None:
        """Put the old bits back and check that they are there. Raises DigestMismatch."""
        if self.in_place:
            raise DigestMismatch("weights that were written in place cannot be put back")
        for run in self._runs:
            run.restore()
        for run in self._runs:
            if not run.is_restored():
                raise DigestMismatch(f"{run.spec.name}: undo failed")


@dataclass(slots=True)
class StagedRun:
    """Elements of one live tensor, checked and ready to be written.

    Attributes:
        spec: What it belongs to, or one of those.
        live: Where it is written: a parameter, or a line of storage.
        start: Flat position of a dense run's first element.
        positions: int64[count] flat positions; None for a dense run.
        bits: int[count], the new bits.
        old: int[count], the undo log.
    """

    spec: ParameterSpec
    live: Live | Tensor
    start: int
    positions: Tensor | None
    bits: Tensor
    old: Tensor

    def commit(self) -> None:
        """Write, and read back while it is still in the cache. Raises DigestMismatch."""
        step = _BLOCK if self.bits.is_cpu and self.positions is not None else len(self.bits)
        for begin in range(0, len(self.bits), step):
            block = slice(begin, begin + step)
            self._write(self.bits, block)
            if not self._is_there(self.bits, block):
                raise DigestMismatch(
                    f"{self.spec.name}: the weights read back are not those that were written"
                )

    def restore(self) -> None:
        """Write the old bits."""
        self._write(self.old, slice(0, len(self.old)))

    def is_restored(self) -> bool:
        """Whether they are there."""
        return self._is_there(self.old, slice(0, len(self.old)))

    def _is_there(self, bits: Tensor, block: slice) -> bool:
        """Whether these of the bits are what is live; of a dense run that is most of the work."""
        is_same = torch.equal if self.positions is not None else are_equal
        return is_same(self._read(block), bits[block])

    def _write(self, bits: Tensor, block: slice) -> None:
        live, positions = self.live, self.positions
        if isinstance(live, Tensor):
            assert positions is not None
            live.scatter_(0, positions[block], bits[block])
        elif positions is None:
            live.write(self.start + block.start, bits[block])
        else:
            live.scatter(positions[block], bits[block])

    def _read(self, block: slice) -> Tensor:
        live, positions = self.live, self.positions
        if isinstance(live, Tensor):
            assert positions is not None
            return live.index_select(0, positions[block])
        if positions is None:
            return live.read(self.start + block.start, self.start + block.stop)
        return live.gather(positions[block])

    @property
    def num_bytes(self) -> int:
        positions = 0 if self.positions is None else self.positions.nbytes
        return positions + self.bits.nbytes + self.old.nbytes


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
        self.storages: list[Tensor] = []
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
    def of(cls, bucket: ReadBucket, where: Ints, lines: Lines, item_size: int) -> HostRows:
        """Copy rows `where` out of a payload, in the order in which they lie in memory."""
        parameter = bucket.rows["parameter"][where]
        line = lines.number[parameter]
        begin = lines.offset[parameter] + bucket.rows["start"][where].astype(np.int64)
        order = np.lexsort((begin, line))
        where, rows = where[order], bucket.rows[where[order]]
        payload = bucket.payload.numpy()
        cuts = np.concatenate(([0], np.cumsum(rows["count"], dtype=np.int64)))
        indices = _joined(payload, bucket.index_at[where], rows["index_bytes"]).view(torch.int32)
        bits = _joined(payload, bucket.value_at[where], rows["value_bytes"])
        bits = bits.view(INTEGERS[item_size])
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

    def pieces(self, ledger: DigestLedger) -> tuple[Ints, NDArray[np.uint64], Ints]:
        """The rows cut where the ledger's chunks end.

        Returns:
            int64[pieces + 1], where the elements of each begin, and n; None is empty.
            uint64[pieces], the digest keys of their first positions. int64[pieces], the chunks of
            the ledger that they belong to.
        """
        chunk_numel, parameter = ledger.chunk_numel, self.rows["parameter"]
        start, span = (self.rows[name].astype(np.int64) for name in ("start", "span"))
        chunk = start // chunk_numel
        row, nth = cut((start + span - 1) // chunk_numel - chunk + 1, 1)
        cuts = np.append(self.cuts[row], self.cuts[-1])
        chunk = chunk[row] + nth
        indices = self.indices.numpy()
        for piece in np.flatnonzero(nth).tolist():
            low, high = self.cuts[row[piece] : row[piece] + 2]
            bound = np.int32(chunk[piece] * chunk_numel - start[row[piece]])
            cuts[piece] += indices[low:high].searchsorted(bound)
        filled = np.flatnonzero(np.diff(cuts))
        cuts, row, chunk = np.append(cuts[filled], cuts[-1]), row[filled], chunk[filled]
        begin = start[row].view(np.uint64) * np.uint64(GOLDEN_RATIO)
        return cuts, ledger.keys[parameter[row]] + begin, ledger.first[parameter[row]] + chunk


def _whole(flat: Flat) -> Tensor:
    """All of the storage that a contiguous tensor lies in, as integers."""
    numel = flat.line.untyped_storage().nbytes() // flat.dtype.item_size
    return flat.line.as_strided((numel,), (1,), 0)


def _joined(payload: NDArray[np.uint8], begin: Ints, num_bytes: NDArray[np.uint64]) -> Tensor:
    """uint8[n]: these pieces of a payload, one after another."""
    bounds = np.stack((begin, begin + num_bytes.astype(np.int64)), axis=1)
    return torch.from_numpy(np.concatenate([payload[a:b] for a, b in bounds.tolist()]))


def _held_of(run: Run, bits: Tensor, flat: Live) -> tuple[Tensor | None, Tensor]:
    """(int64[k] positions, int[k] bits) of what is held of a run; without positions a dense run."""
    if run.indices is None:
        positions = flat.held(run.start, run.stop)
        return positions, bits if positions is None else bits[positions - run.start]
    positions = run.positions().to(bits.device)
    kept = flat.keeps(positions)
    return (positions, bits) if kept is None else (positions[kept], bits[kept])
