"""The sending half on hosts: a copy of a source, compared in spans, and what is packed of it.

`delta.device` has the same for GPUs. A large share is cut into spans. Small ones are read side by
side, since calls for each would cost more than its elements: what is joined stays in the cache,
and the loops over it run in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.changes import Changes
from deltasync.delta.host import (
    Bits,
    Table,
    account_run,
    addresses,
    chunks_of,
    digest_run,
    padded_numel,
)
from deltasync.delta.kernels import host as kernels
from deltasync.delta.kernels.host import unsigned
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.snapshot import Packed, Snapshot, arena, whole_sizes
from deltasync.delta.tiles import CHUNK, Ints, Section, Space
from deltasync.dtypes import Dtype
from deltasync.errors import SourceChanged
from deltasync.wire.changes import ALIGNMENT, TILE, Sizes

_Part: TypeAlias = tuple[int, int, int]
"""(share, start, stop): some elements of a share, from the first of a tile on."""

_Readers: TypeAlias = Mapping[int, Reader]

_SMALL = 1 << 13  # elements of a share up to which reading side by side pays
_TOGETHER = 1 << 15  # elements joined at once: they stay in the L2 cache


@dataclass(frozen=True, slots=True)
class Span:
    """Tiles that follow each other.

    Attributes:
        first: The first one.
        begins: int64[tiles]: where each begins among the elements of all.
        new, old: Return unsigned[n]: the elements of the source as they are now, and of the copy.
    """

    first: int
    begins: Ints
    new: Callable[[], Bits]
    old: Callable[[], Bits]

    @classmethod
    def of(
        cls, space: Space, parts: Sequence[_Part], lines: Sequence[Tensor], readers: _Readers
    ) -> Span:
        """Of parts that follow each other; of several, if `_kind` says that they can be joined."""
        share, start, stop = parts[0]
        begins, num = list[Ints](), 0
        for _, low, high in parts:
            begins.append(np.arange(num, num + high - low, TILE))
            num += high - low
        copies = [lines[one][low:high] for one, low, high in parts]
        at, memory = addresses(copies), {one.untyped_storage().data_ptr() for one in copies}
        if len(memory) == 1 and (np.diff(at) == [one.nbytes for one in copies[:-1]]).all():
            copies = [copies[0].as_strided((num,), (1,))]  # they lie side by side
        old = [unsigned(one) for one in copies]
        first = int(space.first[share]) + start // TILE
        if len(parts) == 1:
            new = partial(_read, readers[share], start, stop)
            return cls(first, begins[0], new, lambda: old[0])
        flats = [flat for one, _, _ in parts if (flat := readers[one].flat) is not None]
        source = [
            unsigned(flat.line[low:high]) for flat, (_, low, high) in zip(flats, parts, strict=True)
        ]
        new = partial(_joined, source, flats[0].tensor.dtype, readers[share].dtype)
        before = partial(_side_by_side, old) if len(old) > 1 else lambda: old[0]
        return cls(first, np.concatenate(begins), new, before)


def spans_of(
    space: Space, low: int, high: int, lines: Sequence[Tensor], readers: _Readers
) -> Iterator[Span]:
    """All of the tiles [low, high).

    Args:
        lines: int[numel] of each share: its copy.
        readers: Of each share: the source. Neither is owned.
    """
    together, num = list[_Part](), 0
    for kind, parts in groupby(space.parts(low, high), lambda part: _kind(readers[part[0]], part)):
        for share, start, stop in parts:
            if kind is None:
                for begin in range(start, stop, CHUNK):
                    part = share, begin, min(begin + CHUNK, stop)
                    yield Span.of(space, [part], lines, readers)
                continue
            together.append((share, start, stop))
            num += stop - start
            if num >= _TOGETHER:
                yield Span.of(space, together, lines, readers)
                together, num = [], 0
        if together:
            yield Span.of(space, together, lines, readers)
            together, num = [], 0


def _kind(reader: Reader, part: _Part) -> tuple[torch.dtype, Dtype] | None:
    """What it has in common with others that it can be joined with; None if with none."""
    flat, (_, start, stop) = reader.flat, part
    if flat is None or stop - start > _SMALL or not (flat.is_contiguous and flat.line.is_cpu):
        return None
    return flat.tensor.dtype, reader.dtype


def _read(reader: Reader, start: int, stop: int) -> Bits:
    return unsigned(reader.read(start, stop).cpu())


def _joined(arrays: Sequence[Any], dtype: torch.dtype, sent: Dtype) -> Bits:
    """Bits of the source, side by side, as they are sent."""
    source = torch.frombuffer(bytearray().join(arrays), dtype=torch.uint8).view(dtype)
    return unsigned(WireReader.of(source, sent, name="source").read(0, len(source)))


def _side_by_side(arrays: Sequence[Any]) -> Bits:
    return np.frombuffer(b"".join(arrays), arrays[0].dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Changes of some tiles: their table, places and values. Whole tiles stay in the source.

    Attributes:
        changed: int64[T]: elements of each tile that differ.
    """

    tiles: Ints
    counts: Ints
    places: NDArray[np.uint16]
    values: Bits
    changed: Ints


class HostFound:
    """Where some tiles of a source differ from a snapshot.

    Attributes:
        section: Of the tiles.
        counts: int64[shares]: elements that differ.
    """

    def __init__(self, snapshot: HostSnapshot, section: Section) -> None:
        self._snapshot, self.section = snapshot, section
        self.counts = np.zeros(len(snapshot.space.shares), np.int64)
        self._groups: list[tuple[int, int]] = []
        self._parts: list[list[Part] | None] = []
        self._rows = [(0, 0, 0)]

    @cached_property
    def ends(self) -> Ints:
        """int64[groups + 1, 3]: tiles, places and whole elements of all groups before. Asked for
        when all groups are there.
        """
        return np.cumsum(np.array(self._rows, np.int64), axis=0)

    def add(self, low: int, high: int, room: int) -> int:
        """Compare the tiles [low, high), which follow those before, as one more group.

        Returns the bytes that their lanes take of payloads. They are kept if that is no more than
        `room`, or found once more when they are emitted.
        """
        parts, space = self._snapshot.part(low, high, only_counts=room <= 0), self._snapshot.space
        for part in parts:
            np.add.at(self.counts, space.share[part.tiles], part.changed)
        self._rows.append(row := self._row(parts))
        self._groups.append((low, high))
        num_bytes = Sizes(self.section.item_size, row[0], row[1], 0).num_bytes
        self._parts.append(parts if num_bytes <= room or not parts else None)
        return num_bytes

    def emit(
        self, low: int, high: int, payload: Tensor, sums: Tensor, packed: Packed, overwrites: bool
    ) -> Changes:
        """Write the changes of groups [low, high) to a payload of their sizes.

        The digests of the copy, int64[chunks], become those of what is sent. Calls `packed` then,
        and before it `overwrites` the copy, which is ahead after that. Raises SourceChanged if
        changes are others than were found.
        """
        parts = [part for n in range(low, high) for part in self._found(n)]
        sizes = Sizes(self.section.item_size, *(int(n) for n in self.ends[high] - self.ends[low]))
        changes = Changes.of(payload, sizes)
        changes.clear_padding()
        for name in ("tiles", "counts", "places", "values"):
            column = getattr(changes, name)
            into = column.numpy().view(f"u{column.element_size()}")
            np.concatenate([getattr(part, name) for part in parts], out=into, casting="unsafe")
        table, changed = Table(self._snapshot.space, changes), sums.numpy().view(np.uint64)
        if sizes.places:
            self._snapshot.add_lanes(table, changed)
        if sizes.whole:
            self._snapshot.copy_whole(table, changed)
        packed()
        if overwrites:
            self._snapshot.advance(changes)
        return changes

    def _row(self, parts: Sequence[Part]) -> tuple[int, int, int]:
        """Tiles, places and whole elements."""
        numel, size = self._snapshot.space.numel, self.section.item_size
        return (
            sum(len(part.tiles) for part in parts),
            sum(int(part.counts.sum()) for part in parts),
            sum(
                int(padded_numel(numel[part.tiles[part.counts == 0]], size).sum()) for part in parts
            ),
        )

    def _found(self, nth: int) -> list[Part]:
        """The parts of a group; found once more if they were not kept."""
        parts, self._parts[nth] = self._parts[nth], None
        if parts is None:
            parts = self._snapshot.part(*self._groups[nth])
            if self._row(parts) != self._rows[nth + 1]:
                raise SourceChanged(
                    "the source was written while it was sent: let nothing step or load until "
                    "send_weights returns, or has called on_source_read"
                )
        return parts


class HostSnapshot(Snapshot):
    """A copy of a source in host memory, and how the source differs from it.

    Args:
        space: What is sent.
        lines: int[numel] of each share: where the copy is, if it is there already. Not owned.
    """

    ahead: NDArray[np.bool_]

    def __init__(self, space: Space, lines: Sequence[Tensor] | None = None) -> None:
        super().__init__(space, arena(space, torch.device("cpu")) if lines is None else lines)
        self._begins = addresses(self.lines)
        self._is_aligned = not (self._begins % space.item_size).any()
        self._elements = space.first_chunk[:-1] * CHUNK
        self.ahead = np.zeros(len(space), np.bool_)
        self._spans: dict[tuple[int, int], list[Span]] = {}

    def take(self, readers: Sequence[Reader]) -> None:
        """Look spans up again only if it is another list."""
        if readers is not self._taken:
            self._spans.clear()
        super().take(readers)

    def take_one(self, share: int, reader: Reader) -> None:
        """The same of one share: the others are not there."""
        self._readers, self._taken = {share: reader}, ()
        self._spans.clear()

    def find(
        self, groups: Sequence[int], room: int, meanwhile: Callable[[], None]
    ) -> list[HostFound]:
        meanwhile()
        made = list[HostFound]()
        for section, group in zip(self.space.sections, groups, strict=True):
            made.append(HostFound(self, section))
            for low in range(section.first, section.stop, group):
                room -= made[-1].add(low, min(low + group, section.stop), room)
        return made

    def part(self, low: int, high: int, *, only_counts: bool = False) -> list[Part]:
        """How the tiles [low, high) differ, in order; or no more than their tables."""
        space, found = self.space, list[Part]()
        if (spans := self._spans.get((low, high))) is None:
            spans = [*spans_of(space, low, high, self.lines, self._readers)]
            self._spans[low, high] = spans
        for span in spans:
            ahead = self.ahead[span.first : span.first + len(span.begins)]
            new, old = span.new(), span.old()
            if columns := kernels.differing(new, old, span.begins, ahead, only_counts=only_counts):
                found.append(Part(span.first + columns[0], *columns[1:]))
        return found

    def add_lanes(self, table: Table, sums: NDArray[np.uint64]) -> None:
        """Account for the lanes in digests."""
        new, old = table.changes.values.numpy(), self.old_lanes(table)
        table.account(self._elements, sums, new, old)

    def copy_whole(self, table: Table, sums: NDArray[np.uint64]) -> None:
        """Fill the column of whole tiles from the source, and account for them in digests."""
        whole, each = table.changes.whole, ALIGNMENT // table.sizes.item_size
        for run in table.runs():
            stop = run.there.stop
            whole[stop : stop + -stop % each] = 0  # padding
            for _, low, high in chunks_of(self._elements[run.share], run.start, run.stop):
                new = whole[run.at + low - run.start : run.at + high - run.start]
                new.copy_(self._readers[run.share].read(low, high))
                account_run(sums, self.space, run.share, low, new, self.lines[run.share][low:high])

    def old_lanes(self, table: Table) -> Bits:
        """unsigned[N]: the bits of the copy at lanes."""
        if self._is_aligned:
            return table.lanes(self._begins).read()
        found: Bits = np.empty(table.sizes.places, f"u{table.sizes.item_size}")
        positions = table.positions()
        for share, lanes in table.by_share():
            found[lanes] = kernels.unsigned(self.lines[share])[positions[lanes]]
        return found

    @property
    def before(self) -> HostSnapshot:
        return self

    def old(self, changes: Changes) -> tuple[Bits, Bits]:
        """(unsigned[N], unsigned[W]): the bits of the copy at lanes and whole tiles of changes."""
        table = Table(self.space, changes)
        whole = np.zeros(len(changes.whole), f"u{changes.whole.element_size()}")
        for run in table.runs():
            whole[run.there] = kernels.unsigned(self.lines[run.share][run.start : run.stop])
        return self.old_lanes(table), whole

    def advance(self, changes: Changes) -> None:
        table = Table(self.space, changes)
        self.ahead[table.tiles] = True
        self.advance_whole(table)
        self.advance_lanes(table)

    def advance_whole(self, table: Table) -> None:
        """Write their whole tiles."""
        for run in table.runs():
            self.lines[run.share][run.start : run.stop] = table.changes.whole[run.there]

    def advance_lanes(self, table: Table) -> None:
        """Write the rest; the copy was not given, but made here."""
        table.lanes(self._begins).write(kernels.unsigned(table.changes.values))

    def whole_of(self, tiles: Ints) -> Changes:
        """All of int64[T] tiles, of one section."""
        payload = torch.empty(
            whole_sizes(self.space, tiles).num_bytes, dtype=torch.uint8, device="cpu"
        )
        self.whole(tiles, payload)
        return Changes.of(payload, whole_sizes(self.space, tiles))

    def whole(self, tiles: Ints, payload: Tensor) -> None:
        changes = Changes.of(payload, whole_sizes(self.space, tiles))
        changes.clear_padding()
        changes.tiles.copy_(torch.from_numpy(tiles))
        changes.counts.zero_()
        changes.whole.zero_()
        for run in Table(self.space, changes).runs():
            changes.whole[run.there] = self.lines[run.share][run.start : run.stop]

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        found = np.zeros(len(chunks), np.uint64)
        for n, chunk in enumerate(chunks.tolist()):
            share, start, stop = self.space.bounds(chunk)
            found[n] = digest_run(self.space, share, start, self.lines[share][start:stop])
        return found
