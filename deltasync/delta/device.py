"""What a sync does on a GPU: find changes, emit and write them, digest tiles, all by kernels.

`delta.detector` has the same for hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.changes import Changes
from deltasync.delta.host import addresses, padded_numel
from deltasync.delta.kernels import tiles as kernels
from deltasync.delta.kernels.reads import AS_IS
from deltasync.delta.kernels.tiles_live import WRITE
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.delta.launches import Tiles, arriving, on, summed, there
from deltasync.delta.readers import Reader
from deltasync.delta.snapshot import Packed, Snapshot, whole_sizes
from deltasync.delta.source import COPIED, WORDS, Source
from deltasync.delta.tiles import Ints, Section, Space
from deltasync.wire.changes import ALIGNMENT, TILE, Sizes


@dataclass(frozen=True, eq=False)
class DeviceFound:
    """Where the tiles of a section differ: see `delta.detector.HostFound`.

    Attributes:
        snapshot, source: What was compared.
        section: Whose tiles.
        group: How many of them are one group.
        words, plan, plan_ends, changed: As kernels have them.
        ends: int64[groups + 1, 3]: tiles, places and whole elements of all groups before.
        num_whole: int64[groups + 1]: whole tiles of all groups before.
    """

    snapshot: DeviceSnapshot
    source: Source
    section: Section
    group: int
    words: Tensor
    plan: Tensor
    plan_ends: Tensor
    changed: Tensor
    ends: Ints
    num_whole: Ints

    @cached_property
    def counts(self) -> Ints:
        """int64[shares]: elements that differ."""
        space, section = self.snapshot.space, self.section
        with on(self.snapshot.device):
            ends = summed(self.changed.to(torch.int64))
            first = np.clip(space.first, section.first, section.stop) - section.first
            return np.diff(ends[there(first, ends.device)].cpu().numpy())

    def emit(
        self, low: int, high: int, payload: Tensor, sums: Tensor, packed: Packed, overwrites: bool
    ) -> Changes:
        """Write the changes of groups [low, high) to a payload of their sizes; and to the copy,
        which is ahead then, if it `overwrites` that. Calls `packed` after both.

        What they change of digests is added to int64[chunks] on the device.
        """
        device, section = self.snapshot.device, self.section
        sizes = Sizes(section.item_size, *(self.ends[high] - self.ends[low]).tolist())
        num_whole = int(self.num_whole[high] - self.num_whole[low])
        with on(device):
            changes = Changes.of(self.snapshot.memory_for(payload), sizes)
            changes.memory[: sizes.columns[-1][0]] = 0
            tile_of = torch.empty(sizes.places, dtype=torch.int32, device=device)
            whole = torch.empty(2 + 2 * num_whole, dtype=torch.int32, device=device)
            stop = min(high * self.group, section.stop - section.first)
            self._locate(low * self.group, stop, changes, tile_of, whole)
            if overwrites:
                self.snapshot.mark_ahead(changes)
            self._fill(changes, tile_of, whole, num_whole, sums, overwrites=overwrites)
            if changes.memory is not payload:
                payload.copy_(changes.memory)
        packed()
        return changes

    def warm_up(self) -> None:
        """Compile what `emit` launches."""
        device, section = self.snapshot.device, self.section
        sizes = Sizes(section.item_size, 1, TILE, TILE)  # enough, if something has changed
        with on(device):
            memory = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=device)
            changes = Changes.of(memory, sizes)
            whole = torch.zeros(4, dtype=torch.int32, device=device)
            tile_of = torch.empty(TILE, dtype=torch.int32, device=device)
            self._locate(0, 1, changes, tile_of, whole)
            changes.places.zero_()
            tile_of[:], whole[2:] = section.first, torch.tensor((section.first, 0), device="cpu")
            sums = torch.zeros(self.snapshot.space.num_chunks, dtype=torch.int64, device=device)
            for overwrites in (False, True):  # with the bits that are there
                self._fill(changes, tile_of, whole, 1, sums, overwrites=overwrites)

    def _locate(
        self, first: int, stop: int, changes: Changes, tile_of: Tensor, whole: Tensor
    ) -> None:
        """Write the table of tiles [first, stop), and find where their changes are."""
        kernels.locate[(-(-(stop - first) // kernels.GROUP),)](
            self.words,
            self.plan,
            self.plan_ends,
            changes.tiles,
            changes.counts,
            changes.places,
            tile_of,
            whole,
            self.section.first,
            self.section.stop - self.section.first,
            first,
            stop,
            GROUP=kernels.GROUP,
            num_warps=4,
        )

    def _fill(
        self,
        changes: Changes,
        tile_of: Tensor,
        whole: Tensor,
        num_whole: int,
        sums: Tensor,
        *,
        overwrites: bool,
    ) -> None:
        """Write values and whole tiles, to the copy too if it `overwrites` that."""
        source, size, tiles = self.source, self.section.item_size, self.snapshot.tiles
        count, reads = len(changes.places), self.source.reads(self.section.item_size)
        for read in reads if count else ():
            kernels.collect[(-(-count // kernels.LANES),)](
                tiles.table,
                source.new_at,
                source.reads_of,
                source.computed,
                tile_of,
                changes.places,
                changes.values,
                sums,
                count,
                TYPE=TYPES[size],
                READ=read,
                CODES_AT=source.codes_at(read),
                SOME=len(reads) > 1,
                OVERWRITES=overwrites,
                ODD=tiles.odd,
                WIDTH=tiles.table.shape[1],
                LANES=kernels.LANES,
                num_warps=4,
                **_EXACT,
            )
        if num_whole:
            self.snapshot.copy_whole(source, changes, whole, num_whole, sums, overwrites)


_EXACT = {"enable_fp_fusion": False}  # codes are computed as torch would


class DeviceSnapshot(Snapshot):
    """A copy of a source that kernels reach, and how the source differs from it.

    Args:
        space: What is sent.
        device: Where kernels run, and the source lives.
        lines: int[numel] of each share, where the copy is: on the device, or in pinned host memory.

    Attributes:
        tiles: Where the copy is.
    """

    device: torch.device
    ahead: Tensor
    _step = COPIED

    def __init__(self, space: Space, device: torch.device, lines: Sequence[Tensor]) -> None:
        super().__init__(space, lines, device)
        self._at = addresses(lines)
        self.tiles = Tiles.of_copy(space, self._at, device)
        self.ahead = torch.zeros(len(space), dtype=torch.uint8, device=device)
        self._source: Source | None = None
        self._borders: tuple[tuple[int, ...], Tensor] | None = None

    def take(self, readers: Sequence[Reader]) -> None:
        if readers is not self._taken:
            self._source = None
        super().take(readers)

    def capture(self, readers: Sequence[Reader]) -> None:
        """Compiles kernels, so that no sync has to."""
        super().capture(readers)
        if self.device.type == "cuda":
            self.warm_up()

    def warm_up(self) -> None:
        """Compile what comparing and packing launches. Nothing but time is spent."""
        groups = [max(1, one.stop - one.first) for one in self.space.sections]
        for found in self.find(groups, 0, lambda: None):
            if found.section.first < found.section.stop:
                found.warm_up()
        with on(self.device):
            self.tiles.warm_up(is_live=False)

    def find(
        self, groups: Sequence[int], room: int, meanwhile: Callable[[], None]
    ) -> list[DeviceFound]:
        """Compare all tiles. Masks are kept, whatever they lead to."""
        count = len(self.space)
        with on(self.device):
            source = self._look_up()
            words = torch.empty((count, WORDS), dtype=torch.int32, device=self.device)
            plan = torch.empty(4 * count, dtype=torch.int64, device=self.device)
            changed = torch.empty(count, dtype=torch.int32, device=self.device)
            if source.masks is not None:
                source.masks.compare(words)
            parts = [
                (words[low:high], plan[4 * low : 4 * high], changed[low:high])
                for low, high in ((one.first, one.stop) for one in self.space.sections)
            ]
            for section, part in zip(self.space.sections, parts, strict=True):
                self._compare(source, section, *part)
            ends = summed(plan)
            numbers = arriving(ends[self._borders_of(groups)])
            meanwhile()
            sums, found, at = numbers(), list[DeviceFound](), 0
            for section, group, part in zip(self.space.sections, groups, parts, strict=True):
                own_words, own_plan, own_changed = part
                stop = at + 4 * (-(-(section.stop - section.first) // group) + 1)
                own = sums[at:stop].reshape(4, -1)
                before, at = (own - own[:, :1]).T, stop
                one = DeviceFound(
                    self,
                    source,
                    section,
                    group,
                    own_words,
                    own_plan,
                    ends[4 * section.first : 4 * section.stop + 1],
                    own_changed,
                    before[:, :3],
                    before[:, 3],
                )
                found.append(one)
        return found

    def memory_for(self, payload: Tensor) -> Tensor:
        """uint8[n] where kernels can pack: the payload itself if they can there."""
        if payload.device == self.device and not payload.data_ptr() % ALIGNMENT:
            return payload
        return torch.empty(payload.shape, dtype=torch.uint8, device=self.device)

    def copy_whole(
        self,
        source: Source | None,
        changes: Changes,
        whole: Tensor,
        num_whole: int,
        sums: Tensor,
        overwrites: bool,
    ) -> None:
        """Fill the column of whole tiles, from the copy if there is no source."""
        tiles, size = self.tiles, changes.sizes.item_size
        at = self._own_at if source is None else source.new_at
        reads = [AS_IS] if source is None else source.reads(size)
        fits = tiles.aligned if source is None else source.suits_wide_loads
        for read in reads:
            kernels.copy_whole[(num_whole * (TILE // kernels.SPAN),)](
                tiles.table,
                at,
                at if source is None else source.reads_of,
                at if source is None else source.computed,
                whole,
                changes.whole,
                sums,
                TYPE=TYPES[size],
                READ=read,
                CODES_AT=None if source is None else source.codes_at(read),
                SOME=len(reads) > 1,
                OVERWRITES=overwrites,
                ODD=tiles.odd,
                ALIGNED=fits[size],
                WIDTH=tiles.table.shape[1],
                SPAN=kernels.SPAN,
                num_warps=4,
                **_EXACT,
            )

    def advance(self, changes: Changes) -> None:
        section = self.space.section_of(changes.sizes.item_size)
        assert section is not None
        with on(self.device):
            self.mark_ahead(changes)
            flag = torch.full((2,), kernels.CLEAR, dtype=torch.int32, device=self.device)
            opened = self.tiles.open(changes, section, flag, torch.full_like(flag, -1))
            self.tiles.change(WRITE, opened, (changes.values, changes.whole), flag)

    def mark_ahead(self, changes: Changes) -> None:
        """Their tiles are going to be written."""
        self.ahead.index_fill_(0, changes.tiles.to(torch.int64), 1)

    def whole(self, tiles: Ints, payload: Tensor) -> None:
        sizes = whole_sizes(self.space, tiles)
        lengths = padded_numel(self.space.numel[tiles], sizes.item_size)
        entries = np.stack((tiles, np.cumsum(lengths) - lengths), axis=1).astype(np.int32)
        with on(self.device):
            changes = Changes.of(self.memory_for(payload), sizes)
            changes.memory[: sizes.columns[-1][0]] = 0
            changes.tiles.copy_(torch.from_numpy(tiles))
            whole = there(np.concatenate(([len(tiles), 0], entries.reshape(-1))), self.device)
            sums = torch.zeros(self.space.num_chunks, dtype=torch.int64, device=self.device)
            self.copy_whole(None, changes, whole.to(torch.int32), len(tiles), sums, False)
            if changes.memory is not payload:
                payload.copy_(changes.memory)

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        return self.tiles.measure(chunks)

    @cached_property
    def _own_at(self) -> Tensor:
        """int64[tiles]: addresses of the copy."""
        return self.tiles.table[:, 0].contiguous()

    def _look_up(self) -> Source:
        if self._source is None:
            self._source = Source(self.tiles, self._at, [*self._readers.values()])
        self._source.copy()
        return self._source

    def _borders_of(self, groups: Sequence[int]) -> Tensor:
        """int64[n]: where the sums of plans stand at the borders of groups."""
        known = self._borders
        if known is None or known[0] != tuple(groups):
            places = []
            for section, group in zip(self.space.sections, groups, strict=True):
                count = section.stop - section.first
                borders = np.append(np.arange(0, count, group), count)
                places += [4 * section.first + row * count + borders for row in range(4)]
            known = self._borders = tuple(groups), there(np.concatenate(places), self.device)
        return known[1]

    def _compare(
        self, source: Source, section: Section, words: Tensor, plan: Tensor, changed: Tensor
    ) -> None:
        """Compare the tiles of a section."""
        for kind in source.kinds[section.item_size]:
            kernels.compare[(kind.num,)](
                self.tiles.table,
                source.new_at,
                self.ahead,
                self.ahead if kind.these is None else kind.these,
                words,
                plan,
                changed,
                section.first,
                section.stop - section.first,
                TYPE=TYPES[section.item_size],
                READ=kind.read,
                ALIGNED=kind.is_aligned,
                SOME=kind.these is not None,
                WIDTH=self.tiles.table.shape[1],
                num_warps=4,
            )
