"""Parts of a checkpoint tensor: what a rank of an engine keeps of it, in boxes of live tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from deltasync.delta.bits import Box, Flat
from deltasync.delta.routes.route import Piece
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError

_BLOCK = 1 << 20  # positions that are looked at together: some 60 bytes for each


@dataclass(frozen=True, slots=True)
class _Box:
    """One piece, and flat access to its elements in the order of the checkpoint."""

    piece: Piece
    flat: Flat

    def find(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(bool[n], int64[n]): which flat positions of the checkpoint tensor lie in the box, and
        where; the latter means nothing for those that do not.
        """
        rest = positions - self.piece.start
        inside, place = rest >= 0, torch.zeros_like(rest)
        for size, stride, _ in self.piece.dims:
            index = rest.div(stride, rounding_mode="floor")
            inside &= index < size
            rest, place = rest - index * stride, place * size + index
        return inside & (rest == 0), place


class Part:
    """Access to those elements of a checkpoint tensor that a rank keeps, by where they are in it.

    Attributes:
        dtype: Entry in the closed table.
        numel: Elements kept.
        line: int[...], storage of the first box: says where they live.
        is_contiguous: False.
    """

    is_contiguous = False

    def __init__(self, boxes: Sequence[_Box], dtype: Dtype) -> None:
        self._boxes, self.dtype = tuple(boxes), dtype
        self.numel = sum(box.flat.numel for box in boxes)
        self.line = boxes[0].flat.line

    @classmethod
    def of(cls, pieces: Sequence[Piece], live: Mapping[str, Tensor], *, name: str) -> Self:
        """From pieces of one checkpoint tensor. Raises ConfigError if two hold one element."""
        _refuse_twice(pieces, name)
        boxes = [_Box(piece, Flat.of(piece.view(live[piece.live]), name=name)) for piece in pieces]
        return cls(boxes, boxes[0].flat.dtype)

    def boxes(self) -> list[Box]:
        """One for each piece that is not empty."""
        return [
            Box(box.flat.tensor.data_ptr(), box.piece.start, box.piece.dims)
            for box in self._boxes
            if box.flat.numel
        ]

    def held(self, start: int, stop: int) -> Tensor:
        """int64[k]: which flat positions of [start, stop) are kept here, in order."""
        found = [torch.empty(0, dtype=torch.int64, device=self.line.device)]
        for begin in range(start, stop, _BLOCK):
            end = min(begin + _BLOCK, stop)
            positions = torch.arange(begin, end, device=self.line.device)
            found.append(positions[self.keeps(positions)])
        return torch.cat(found)

    def keeps(self, positions: Tensor) -> Tensor:
        """bool[n]: which of int64[n] flat positions are kept here."""
        kept = torch.zeros_like(positions, dtype=torch.bool)
        for part, into in zip(_blocks(positions), _blocks(kept), strict=True):
            for box in self._boxes:
                into |= box.find(part)[0]
        return kept

    def read(self, start: int, stop: int) -> Tensor:
        """int[k]: the bits at the flat positions `held(start, stop)`."""
        return self.gather(self.held(start, stop))

    def write(self, start: int, bits: Tensor) -> None:
        """Overwrite what is kept of the run that begins at `start` with int[n] bits for all."""
        positions = self.held(start, start + len(bits))
        self.scatter(positions, bits[positions - start])

    def gather(self, positions: Tensor) -> Tensor:
        """int[n]: the bits at int64[n] flat positions, all of them kept here."""
        bits = torch.empty(len(positions), dtype=self.line.dtype, device=self.line.device)
        for part, into in zip(_blocks(positions), _blocks(bits), strict=True):
            for box in self._boxes:
                inside, place = box.find(part)
                into[inside] = box.flat.gather(place[inside])
        return bits

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        """Overwrite the bits at int64[n] distinct flat positions, all of them kept here."""
        for part, new in zip(_blocks(positions), _blocks(bits), strict=True):
            for box in self._boxes:
                inside, place = box.find(part)
                box.flat.scatter(place[inside], new[inside])


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, _BLOCK)


def _refuse_twice(pieces: Sequence[Piece], name: str) -> None:
    """Raise ConfigError for an element that two places hold."""
    for piece in pieces:
        reach = 0
        for size, stride, _ in reversed(piece.dims):  # the innermost first
            if stride <= reach:
                raise ConfigError(_twice(name, [piece]))
            reach += (size - 1) * stride
    if len(pieces) == 1:
        return
    last = max(p.start + sum((n - 1) * s for n, s, _ in p.dims) for p in pieces if p.numel)
    count = torch.zeros(last + 1, dtype=torch.uint8)
    for piece in pieces:
        count.as_strided(piece.shape, piece.strides, piece.start).add_(1)
    if int(count.count_nonzero()) != sum(prod(piece.shape) for piece in pieces):
        raise ConfigError(_twice(name, pieces))


def _twice(name: str, pieces: Sequence[Piece]) -> str:
    lives = " and ".join(repr(live) for live in dict.fromkeys(piece.live for piece in pieces))
    return f"{name!r} has no route: the engine keeps some of its elements twice, in {lives}"
