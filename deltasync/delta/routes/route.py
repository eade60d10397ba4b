"""Routes: where an engine keeps the elements of checkpoint tensors.

An engine's live tensors are not the checkpoint's: fused, stacked, transposed, sharded, padded. Its
own loader knows how, and `recorder.record` watches it once. What it copies are affine pieces.
A checkpoint tensor that lies in one piece has a live tensor of its own, as a view: that is
compared, staged and written like any other, and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from deltasync.delta.region import Region, ordered, paired, unpaired


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one checkpoint tensor, and where a live tensor keeps them.

    Attributes:
        live: The live tensor's name.
        source: The elements in the checkpoint tensor, in its order.
        target: The same elements, in the same order, in the live tensor's storage.
    """

    live: str
    source: Region
    target: Region

    @classmethod
    def of(cls, live: str, source: Region, target: Region) -> Self:
        """From regions that have the elements in the same order, whichever that is."""
        return cls(live, *ordered(source, target))


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same elements in fewer pieces where neighbours continue each other; in order."""
    if len(pieces) < 2:
        return tuple(pieces)
    pieces = sorted(pieces, key=lambda one: (one.source.start, one.live, one.target.start))
    if (row := _row_of(pieces)) is not None:
        return (row,)
    done: list[Piece] = []
    for piece in pieces:
        longer = _continued(done[-1], piece) if done else None
        done[-1:] = [longer] if longer is not None else [*done[-1:], piece]
    return tuple(done)


def _steps(piece: Piece, after: Piece) -> tuple[int, int]:
    """How far apart two pieces begin, in the checkpoint tensor and in the live one."""
    return after.source.start - piece.source.start, after.target.start - piece.target.start


def _row_of(pieces: Sequence[Piece]) -> Piece | None:
    """One piece of several that are alike and stand at equal distances, or None."""
    first = pieces[0]
    if len({(one.live, one.source.dims, one.target.dims) for one in pieces}) > 1:
        return None
    (step, live_step), *others = {_steps(*two) for two in pairwise(pieces)}
    if others or step <= 0 or live_step <= 0:
        return None
    source = first.source.times(len(pieces), step)
    return Piece.of(first.live, source, first.target.times(len(pieces), live_step))


def _continued(piece: Piece, after: Piece) -> Piece | None:
    """One piece of both if they differ in one size, along which they stand together, or None."""
    dims, others = (paired(one.source, one.target) for one in (piece, after))
    if piece.live != after.live or len(dims) != len(others):
        return None
    steps = _steps(piece, after)
    for place, (size, stride, live_stride) in enumerate(dims):
        more = others[place][0]
        dims[place] = (more, stride, live_stride)
        if dims == others and steps == (size * stride, size * live_stride):
            dims[place] = (size + more, stride, live_stride)
            return Piece(piece.live, *unpaired(piece.source.start, piece.target.start, dims))
        dims[place] = (size, stride, live_stride)
    return None


def covers(live: Tensor, regions: Sequence[Region]) -> bool:
    """Whether `regions` of a live tensor's storage are all of its elements, each exactly once.

    Of regions that are runs the ends are compared; others take a byte an element, for a moment.
    """
    if sum(region.numel for region in regions) != live.numel():
        return False
    if live.is_contiguous() and all(region.is_run for region in regions):
        runs = sorted((region.start, region.numel) for region in regions if region.numel)
        ends = accumulate((count for _, count in runs), initial=int(live.storage_offset()))
        return all(start == end for (start, _), end in zip(runs, ends, strict=False))
    extent = live.untyped_storage().nbytes() // live.element_size()
    seen = torch.zeros(extent, dtype=torch.uint8)
    for region in regions:
        region.view(seen).add_(1)
    return bool((Region.of(live).view(seen) == 1).all())
