"""Routes: where an engine keeps the elements of checkpoint tensors.

An engine's live tensors are not the checkpoint's: fused, stacked, transposed, sharded, padded. Its
own loader knows how, and `recorder.record` watches it once. What it copies are affine pieces.
A checkpoint tensor that lies in one piece has a live tensor of its own, as a view: that is
compared, staged and written like any other, and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

Dims = list[tuple[int, int, int]]
"""(size, stride in the checkpoint tensor, stride elsewhere) of each dimension of a box."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of elements of one checkpoint tensor, and where a live tensor keeps them.

    Element (c0, c1, ...) of the box is element `start + sum(c * strides)` of the checkpoint tensor,
    row-major, and element `live_start + sum(c * live_strides)` of the live tensor's storage.

    Attributes:
        live: The live tensor's name.
        shape: Of the box.
        start, strides: In the checkpoint tensor, in elements.
        live_start, live_strides: In the live tensor's storage, in elements.
    """

    live: str
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    live_start: int
    live_strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        live: str,
        start: int,
        live_start: int,
        dims: Iterable[tuple[int, int, int]],
    ) -> Piece:
        """From (size, stride, live stride) of each dimension: in as few as it takes, in the
        checkpoint's order.
        """
        few = merged(dims)
        sizes, strides, live_strides = zip(*few, strict=True) if few else ((), (), ())
        return cls(live, sizes, start, strides, live_start, live_strides)

    @property
    def dims(self) -> Dims:
        """(size, stride, live stride) of each dimension."""
        return list(zip(self.shape, self.strides, self.live_strides, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def is_whole(self, numel: int) -> bool:
        """Whether it is all of a checkpoint tensor of so many elements, in that one's order."""
        alike = self.strides == row_major(self.shape)
        return self.numel == numel and self.start == 0 and (alike or not numel)

    def view(self, live: Tensor) -> Tensor:
        """The box's elements in the live tensor: a view. Not owned."""
        return live.detach().as_strided(self.shape, self.live_strides, self.live_start)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape), int.__mul__, initial=1))[-2::-1]


def merged(dims: Iterable[tuple[int, int, int]]) -> Dims:
    """The same box in as few dimensions as it takes, in the checkpoint's order."""
    done: Dims = []
    for size, stride, live_stride in sorted(dims, key=lambda d: (-d[1], d[0])):
        if size == 1:
            continue
        if done and done[-1][1:] == (size * stride, size * live_stride):
            size *= done.pop()[0]
        done.append((size, stride, live_stride))
    return done


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same elements in fewer pieces where neighbours continue each other; in order."""
    if len(pieces) < 2:
        return tuple(pieces)
    ordered = sorted(pieces, key=lambda piece: (piece.start, piece.live, piece.live_start))
    if (row := _row_of(ordered)) is not None:
        return (row,)
    done: list[Piece] = []
    for piece in ordered:
        longer = _continued(done[-1], piece) if done else None
        done[-1:] = [longer] if longer is not None else [*done[-1:], piece]
    return tuple(done)


def _row_of(pieces: Sequence[Piece]) -> Piece | None:
    """One piece of several that are alike and stand at equal distances, or None."""
    first = pieces[0]
    steps = {
        (b.start - a.start, b.live_start - a.live_start, a.live == b.live, a.dims == b.dims)
        for a, b in pairwise(pieces)
    }
    step, live_step, same_live, same_dims = steps.pop()
    if steps or not (same_live and same_dims and step > 0 and live_step > 0):
        return None
    dims = [(len(pieces), step, live_step), *first.dims]
    return Piece.of(first.live, first.start, first.live_start, dims)


def _continued(piece: Piece, after: Piece) -> Piece | None:
    """One piece of both if they differ in one size, along which they stand together, or None."""
    if piece.live != after.live or len(piece.shape) != len(after.shape):
        return None
    step, live_step = after.start - piece.start, after.live_start - piece.live_start
    for place, (size, stride, live_stride) in enumerate(piece.dims):
        dims, others = piece.dims, after.dims
        more = others[place][0]
        others[place] = (size, *others[place][1:])
        if dims == others and (step, live_step) == (size * stride, size * live_stride):
            dims[place] = (size + more, stride, live_stride)
            return Piece.of(piece.live, piece.start, piece.live_start, dims)
    return None


def covers(live: Tensor, regions: Sequence[Piece]) -> bool:
    """Whether `regions` of a live tensor are all of its elements, each exactly once.

    Of regions that are runs the ends are compared; others take a byte an element, for a moment.
    """
    if sum(region.numel for region in regions) != live.numel():
        return False
    if live.is_contiguous() and all(_is_run(region) for region in regions):
        runs = sorted((region.live_start, region.numel) for region in regions if region.numel)
        ends = accumulate((count for _, count in runs), initial=int(live.storage_offset()))
        return all(start == end for (start, _), end in zip(runs, ends, strict=False))
    extent = live.untyped_storage().nbytes() // live.element_size()
    seen = torch.zeros(extent, dtype=torch.uint8)
    for region in regions:
        seen.as_strided(region.shape, region.live_strides, region.live_start).add_(1)
    return bool((seen.as_strided(live.shape, live.stride(), live.storage_offset()) == 1).all())


def _is_run(region: Piece) -> bool:
    return region.shape == () or region.live_strides == (1,)
