"""Routes: where an engine keeps the elements of checkpoint tensors.

An engine's live tensors are not the checkpoint's: fused, stacked, transposed, sharded, padded. Its
own loader knows how, and `recorder.record` watches it once. What it copies are affine pieces.
A checkpoint tensor that lies in one piece has a live tensor of its own, as a view: that is
compared, staged and written like any other, and costs nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live
from deltasync.delta.region import Region, paired
from deltasync.dtypes import Dtype
from deltasync.engines.routes.regions import find, ordered, unpaired
from deltasync.errors import ConfigError

_BLOCK = 1 << 18  # positions looked at together: some 400 bytes for each that has 8 codes


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one checkpoint tensor, and where a live tensor keeps them.

    Attributes:
        live: The live tensor's name.
        source: The elements in the checkpoint tensor, in its order.
        target: The same elements, in the same order, in the live tensor's storage.
        code: Which 4 bits of each element these are, the low ones first, where an engine moves
            codes of 4 bits apart; `target` counts in these then. None for whole elements.
    """

    live: str
    source: Region
    target: Region
    code: int | None = None

    @classmethod
    def of(cls, live: str, source: Region, target: Region) -> Self:
        """From regions that have the elements in the same order, which may be any: see `paired`."""
        return cls(live, *ordered(source, target))


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge neighbouring pieces that continue each other. The result is in the source's order."""
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
    """One piece of several that have the same shape at equal distances, or None."""
    first = pieces[0]
    if len({(one.live, one.source.dims, one.target.dims) for one in pieces}) > 1:
        return None
    (step, live_step), *others = {_steps(*two) for two in pairwise(pieces)}
    if others or step <= 0 or live_step <= 0:
        return None
    source = Region(first.source.start, ((len(pieces), step), *first.source.dims))
    target = Region(first.target.start, ((len(pieces), live_step), *first.target.dims))
    return Piece.of(first.live, source, target)


def _continued(piece: Piece, after: Piece) -> Piece | None:
    """One piece of both if `after` continues `piece` along one dimension, or None."""
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
    seen = torch.zeros(extent, dtype=torch.uint8, device="cpu")
    for region in regions:
        region.view(seen).add_(1)
    return bool((Region.of(live).view(seen) == 1).all())


class Part(Live):
    """The elements of a checkpoint tensor that a rank keeps, in boxes: see `delta.bits.Live`.

    Args:
        boxes: Elements, and what has bits of each by its place among these.
        held: All elements that are kept.
        dtype: Entry in the closed table.
        line: int[...], says where they live.
        is_whole: Whether they are all of the tensor.
    """

    is_contiguous = False

    def __init__(
        self,
        boxes: Sequence[tuple[Region, Live]],
        held: Sequence[Region],
        dtype: Dtype,
        line: Tensor,
        *,
        is_whole: bool = False,
    ) -> None:
        self._boxes, self._held, self._is_whole = boxes, held, is_whole
        self.dtype, self.line = dtype, line
        self.numel = sum(region.numel for region in held)

    @classmethod
    def of(cls, pieces: Sequence[Piece], live: Mapping[str, Tensor], *, name: str) -> Part:
        """From pieces of one checkpoint tensor. Raises ConfigError if two hold one element."""
        _refuse_twice(pieces, name)
        views = [piece.target.view(live[piece.live]) for piece in pieces]
        flats = [Flat.of(view, name=name) for view in views]
        held = [piece.source for piece in pieces]
        return Part(list(zip(held, flats, strict=True)), held, flats[0].dtype, flats[0].line)

    def boxes(self) -> list[tuple[Region, Tensor]]:
        return [(region, view) for region, live in self._boxes for _, view in live.boxes()]

    def keeps(self, positions: Tensor) -> Tensor | None:
        if self._is_whole:
            return None
        kept = torch.zeros_like(positions, dtype=torch.bool)
        for part, into in zip(_blocks(positions), _blocks(kept), strict=True):
            for region in self._held:
                into |= find(region, part)[0]
        return kept

    def gather(self, positions: Tensor) -> Tensor:
        bits = self.line.new_zeros(len(positions))
        for part, into in zip(_blocks(positions), _blocks(bits), strict=True):
            for region, live in self._boxes:
                inside, numbers = self._inside(region, part)
                into[inside] |= live.gather(numbers)
        return bits

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        for part, new in zip(_blocks(positions), _blocks(bits), strict=True):
            for region, live in self._boxes:
                inside, numbers = self._inside(region, part)
                live.scatter(numbers, new[inside])

    def _inside(self, region: Region, positions: Tensor) -> tuple[Tensor | slice, Tensor]:
        """(bool[n] or all, int64[k]): which positions a box has, and their places there."""
        if self._is_whole and region == Region.run(0, self.numel):
            return slice(None), positions
        inside, numbers = find(region, positions)
        return inside, numbers[inside]


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, _BLOCK)


def _refuse_twice(pieces: Sequence[Piece], name: str) -> None:
    """Raise ConfigError for an element that two places hold."""
    wrong = [piece for piece in pieces if not piece.source.is_rising]
    if not wrong and len(pieces) > 1:
        numel = max(piece.source.stop for piece in pieces)
        seen = torch.zeros(numel, dtype=torch.bool, device="cpu")
        for piece in pieces:
            piece.source.view(seen).fill_(True)
        if int(seen.count_nonzero()) != sum(piece.source.numel for piece in pieces):
            wrong = list(pieces)
    if wrong:
        lives = " and ".join(repr(live) for live in dict.fromkeys(piece.live for piece in wrong))
        raise ConfigError(
            f"{name!r} has no route: the engine keeps some of its elements twice, in {lives}"
        )
