"""Parts of a checkpoint tensor: what a rank of an engine keeps of it, in boxes of live tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from deltasync.delta.bits import Flat
from deltasync.delta.region import Region
from deltasync.delta.routes.route import Piece
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError

_BLOCK = 1 << 20  # positions that are looked at together: some 60 bytes for each


class Part:
    """Access to those elements of a checkpoint tensor that a rank keeps, by where they are in it.

    Attributes:
        dtype: Entry in the closed table.
        numel: Elements kept.
        line: int[...], storage of the first box: says where they live.
        is_contiguous: False.
    """

    is_contiguous = False

    def __init__(self, boxes: Sequence[tuple[Region, Flat]], dtype: Dtype) -> None:
        self._boxes, self.dtype = tuple(boxes), dtype
        self.numel = sum(flat.numel for _, flat in boxes)
        self.line = boxes[0][1].line

    @classmethod
    def of(cls, pieces: Sequence[Piece], live: Mapping[str, Tensor], *, name: str) -> Self:
        """From pieces of one checkpoint tensor. Raises ConfigError if two hold one element."""
        _refuse_twice(pieces, name)
        views = [piece.target.view(live[piece.live]) for piece in pieces]
        flats = [Flat.of(view, name=name) for view in views]
        sources = [piece.source for piece in pieces]
        return cls(list(zip(sources, flats, strict=True)), flats[0].dtype)

    def boxes(self) -> list[tuple[Region, Tensor]]:
        """One for each piece that is not empty."""
        return [(region, flat.tensor) for region, flat in self._boxes if flat.numel]

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
            for region, _ in self._boxes:
                into |= region.find(part)[0]
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
            for region, flat in self._boxes:
                inside, number = region.find(part)
                into[inside] = flat.gather(number[inside])
        return bits

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        """Overwrite the bits at int64[n] distinct flat positions, all of them kept here."""
        for part, new in zip(_blocks(positions), _blocks(bits), strict=True):
            for region, flat in self._boxes:
                inside, number = region.find(part)
                flat.scatter(number[inside], new[inside])


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, _BLOCK)


def _refuse_twice(pieces: Sequence[Piece], name: str) -> None:
    """Raise ConfigError for an element that two places hold."""
    wrong = [piece for piece in pieces if not piece.source.is_rising]
    if not wrong and len(pieces) > 1:
        seen = torch.zeros(max(piece.source.stop for piece in pieces), dtype=torch.bool)
        for piece in pieces:
            piece.source.view(seen).fill_(True)
        if int(seen.count_nonzero()) != sum(piece.source.numel for piece in pieces):
            wrong = list(pieces)
    if wrong:
        lives = " and ".join(repr(live) for live in dict.fromkeys(piece.live for piece in wrong))
        raise ConfigError(
            f"{name!r} has no route: the engine keeps some of its elements twice, in {lives}"
        )
