"""A space on a device, and launches of kernels over it that both ends of a sync make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.changes import Changes
from deltasync.delta.kernels import tiles as kernels
from deltasync.delta.kernels import tiles_live
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.delta.tiles import CHUNK_TILES, Ints, Section, Space
from deltasync.wire.changes import ALIGNMENT, TILE, Sizes

IN_RUNS = -1
"""See `Tiles.ways`."""

_LEAST_PROGRAMS = 4096  # over whole tiles, which may be tiny
_LARGEST_COLS = 1 << 30  # kernels divide by them; a tile sees no more than one end of such a row
_LIVE = tiles_live.PREDICT, tiles_live.REPLACE, tiles_live.READ_BACK  # not done to copies
_ROWS, _ROW_LANES = 16, 64  # of one program of `expand`


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def there(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def arriving(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Send a tensor's values to the host, as they are on the current stream now. Returns what waits
    for them.
    """
    if not tensor.is_cuda:
        return tensor.clone().numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))

    def read() -> NDArray[Any]:
        event.synchronize()
        return host.numpy()

    return read


def summed(plan: Tensor) -> Tensor:
    """int64[n + 1]: the sums of all of int64[n] before each, and of all."""
    ends = torch.empty(len(plan) + 1, dtype=torch.int64, device=plan.device)
    ends[:1].zero_()
    torch.cumsum(plan, 0, out=ends[1:])
    return ends


@dataclass(frozen=True, slots=True)
class Rows:
    """How elements of each tile lie in their parameter.

    Attributes:
        begin: int64[tiles]: how far its first element is from the first one of the share.
        before, cols, gap: int64[tiles]: elements of its row before that, in a row, and between two.
    """

    begin: Ints
    before: Ints
    cols: Ints
    gap: Ints

    @classmethod
    def of(cls, space: Space) -> Rows:
        """Of all tiles."""
        cols = np.array([share.cols for share in space.shares], np.int64)[space.share]
        gap = np.array([share.gap for share in space.shares], np.int64)[space.share]
        row, before = space.start // cols, space.start % cols
        few: Ints = np.minimum(cols, _LARGEST_COLS)
        left: Ints = np.minimum(cols - before, few)  # of the row, if it is long
        return cls(space.start + row * gap, np.where(cols == few, before, few - left), few, gap)


@dataclass(frozen=True, slots=True)
class Opened:
    """Changes, and what kernels need to know of them.

    Attributes:
        section: Whose tiles they are.
        num_tiles: T.
        tile_of, whole: See `kernels.locate`.
        places: int16[N].
    """

    section: Section
    num_tiles: int
    tile_of: Tensor
    places: Tensor
    whole: Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """A space as kernels see it.

    Attributes:
        space: The same.
        table: int64[tiles, width]: see `kernels.tiles`.
        odd: What kernels take as ODD.
        aligned: By item size, whether tiles begin at multiples of 16 bytes, and have a multiple of
            16 elements.
        dims: Dimensions of a box; 0 if all elements lie in runs.
        boxes, entries: int64[2 + 3 * dims + 16, boxes], int32[n]: where elements are that lie in
            no run, see `kernels.tiles_live`.
        is_small: Whether no parameter has 2^31 elements.
        ways: By item size, where kernels have to look for elements: in runs (`IN_RUNS`), in boxes
            (0), and for so many codes in these.
    """

    space: Space
    table: Tensor
    odd: int
    aligned: Mapping[int, bool]
    dims: int
    boxes: Tensor
    entries: Tensor
    is_small: bool
    ways: Mapping[int, Sequence[int]]

    @classmethod
    def of_copy(cls, space: Space, at: Ints, device: torch.device) -> Tiles:
        """Of shares that lie at int64[shares] addresses."""
        rows = Rows.of(space)
        address = at[space.share] + space.start * space.item_size[space.share]
        keys = space.keys_of(space.share, rows.begin).view(np.int64)
        columns = [address, keys, space.numel, space.chunk]
        if odd := kernels.SHARES if space.gaps else 0:
            columns += [rows.before, rows.cols, rows.gap, np.zeros_like(address)]
        table = there(np.stack(columns, axis=1).astype(np.int64), device)
        ways = {one.item_size: (IN_RUNS,) for one in space.sections}
        fits = aligned_by_size(space, address)
        return cls(space, table, odd, fits, 0, table, table, is_small=True, ways=ways)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def open(self, changes: Changes, section: Section, flag: Tensor, after: Tensor) -> Opened:
        """Check changes on the device. Nothing waits; what is bad raises the flag.

        Args:
            changes: Of some tiles, at least one.
            section: Which tiles may come.
            flag, after: See `kernels.unpack`.
        """
        count, lanes, values = len(changes.tiles), len(changes.places), len(changes.whole)
        size, device, width = section.item_size, self.device, self.table.shape[1]
        each = ALIGNMENT // size
        plan = torch.empty(3 * count, dtype=torch.int64, device=device)
        kernels.unpack[(-(-count // kernels.LANES),)](
            self.table,
            changes.tiles,
            changes.counts,
            plan,
            flag,
            after,
            section.first,
            section.stop,
            count,
            EACH=each,
            WIDTH=width,
            LANES=kernels.LANES,
            num_warps=4,
        )
        tile_of = torch.empty(lanes, dtype=torch.int32, device=device)
        num_whole = min(count, -(-values // each))
        whole = torch.empty(2 + 2 * num_whole, dtype=torch.int32, device=device)
        kernels.expand[(-(-count // _ROWS),)](
            self.table,
            changes.tiles,
            plan,
            summed(plan),
            changes.places,
            tile_of,
            whole,
            flag,
            after,
            count,
            lanes,
            values,
            WIDTH=width,
            ROWS=_ROWS,
            LANES=_ROW_LANES,
            num_warps=4,
        )
        return Opened(section, count, tile_of, changes.places, whole)

    def change(
        self,
        does: int,
        opened: Opened,
        new: tuple[Tensor, Tensor],
        flag: Tensor,
        old: tuple[Tensor, Tensor] | None = None,
        sums: Tensor | None = None,
        gains: Tensor | None = None,
    ) -> None:
        """Change what changes are of, or look what that would do, unless the flag is raised.

        Args:
            does: See `kernels.tiles_live.change`.
            opened: The changes.
            new: int[N] and int[W]: their bits.
            flag, sums, gains: As there; None for those that are not taken.
            old: Of the sizes of `new`: where those that they replace go.
        """
        size, num_lanes, num_whole = opened.section.item_size, len(new[0]), len(new[1])
        where = self.table, self.boxes, self.entries, self.boxes.shape[1]
        old, sums = new if old is None else old, flag if sums is None else sums
        rest = flag, sums, flag if gains is None else gains
        for codes in self.ways[size]:
            way, span = self._way(size, codes) | {"num_warps": 4}, _span(codes)
            if num_lanes:
                tiles_live.change[(-(-num_lanes // span),)](
                    *where,
                    opened.tile_of,
                    opened.places,
                    new[0],
                    old[0],
                    *rest,
                    num_lanes,
                    DOES=does,
                    LANES=span,
                    **way,
                )
            if num_whole:
                tiles_live.change_whole[(self._programs(opened, num_whole, codes),)](
                    *where,
                    opened.whole,
                    new[1],
                    old[1],
                    *rest,
                    DOES=does,
                    ALIGNED=self._suits_wide_loads(size, codes),
                    SPAN=span,
                    **way,
                )

    def warm_up(self, *, is_live: bool) -> None:
        """Compile what opens and writes changes; of live weights, what predicts them too.

        The flag is raised: nothing is written. A commit that compiled would pause an engine.
        """
        for section in self.space.sections:
            sizes = Sizes(section.item_size, 1, 1, ALIGNMENT // section.item_size)
            memory = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=self.device)
            changes = Changes.of(memory, sizes)
            flag, after = torch.zeros((2, 4), dtype=torch.int32, device=self.device)
            gains = torch.zeros(2 * tiles_live.ACCUMULATORS, dtype=torch.int64, device=self.device)
            opened, bits = self.open(changes, section, flag, after), (changes.values, changes.whole)
            self.change(tiles_live.WRITE, opened, bits, flag)
            for does in _LIVE if is_live else ():
                self.change(does, opened, bits, flag, None, gains, gains)

    def measure(self, chunks: Ints) -> NDArray[np.uint64]:
        """uint64[n]: the digests of int64[n] chunks of this space, read from memory."""
        space, sums = self.space, torch.zeros(len(chunks), dtype=torch.int64, device=self.device)
        share = space.first_chunk.searchsorted(chunks, "right") - 1
        first = space.first[share] + (chunks - space.first_chunk[share]) * CHUNK_TILES
        count = np.minimum(CHUNK_TILES, space.first[share + 1] - first)
        place = np.repeat(np.arange(len(chunks)), count)
        tile = np.arange(len(place)) + np.repeat(first - np.cumsum(count) + count, count)
        with on(self.device):
            for section in space.sections:
                here = (tile >= section.first) & (tile < section.stop)
                if not here.any():
                    continue
                tiles, places = (
                    there(c[here].astype(np.int32), self.device) for c in (tile, place)
                )
                for codes in self.ways[section.item_size]:
                    tiles_live.digest[(len(tiles) * (TILE // _span(codes)),)](
                        self.table,
                        self.boxes,
                        self.entries,
                        self.boxes.shape[1],
                        tiles,
                        places,
                        sums,
                        ALIGNED=self._suits_wide_loads(section.item_size, codes),
                        SPAN=_span(codes),
                        num_warps=4,
                        **self._way(section.item_size, codes),
                    )
        return sums.cpu().numpy().view(np.uint64)

    def _way(self, item_size: int, codes: int) -> dict[str, Any]:
        """What kernels are compiled for: `codes` as in `ways`."""
        return {
            "TYPE": TYPES[item_size],
            "DIMS": 0 if codes == IN_RUNS else self.dims,
            "CODES": max(codes, 0),
            "ODD": self.odd,
            "WIDTH": self.table.shape[1],
            "SMALL": self.is_small,
        }

    def _suits_wide_loads(self, item_size: int, codes: int) -> bool:
        return self.aligned[item_size] and codes == IN_RUNS

    def _programs(self, opened: Opened, num_whole: int, codes: int) -> int:
        """Of a launch over whole tiles, of which the device alone knows how many there are."""
        most = opened.num_tiles * (TILE // _span(codes))
        return min(most, max(-(-num_whole // _span(codes)), _LEAST_PROGRAMS))


def _span(codes: int) -> int:
    """Elements that one program looks for."""
    return kernels.SPAN if codes == IN_RUNS else kernels.BOX_SPAN


def aligned_by_size(space: Space, address: Ints) -> dict[int, bool]:
    """Whether tiles that lie at int64[tiles] addresses suit wide loads, by item size."""
    odd = (address | space.numel) % ALIGNMENT
    return {one.item_size: not odd[one.first : one.stop].any() for one in space.sections}
