"""A source and its copy in spans, each of which is compared at once.

A large share is cut. Small ones are read side by side, since calls for each would cost more than
its elements: what is joined stays in the cache, and the loops over it run in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.kernels.host import unsigned
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.tiles import CHUNK, Ints, Space
from deltasync.dtypes import Dtype
from deltasync.wire.changes import TILE

_Bits: TypeAlias = NDArray[Any]
_Part: TypeAlias = tuple[int, int, int]
"""(share, start, stop): some elements of a share, from the first of a tile on."""

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
    new: Callable[[], _Bits]
    old: Callable[[], _Bits]

    @classmethod
    def of(
        cls, space: Space, parts: Sequence[_Part], lines: Sequence[Tensor], readers: _Readers
    ) -> Span:
        """Of parts that follow each other; of several, if `_kind` says that they can be joined."""
        share, start, stop = parts[0]
        begins, num, old = list[Ints](), 0, list[_Bits]()
        for one, low, high in parts:
            begins.append(np.arange(num, num + high - low, TILE))
            num += high - low
            old.append(unsigned(lines[one][low:high]))
        first = int(space.first[share]) + start // TILE
        if len(parts) == 1:
            new = partial(_read, readers[share], start, stop)
            return cls(first, begins[0], new, lambda: old[0])
        flats = [flat for one, _, _ in parts if (flat := readers[one].flat) is not None]
        source = [
            unsigned(flat.line[low:high]) for flat, (_, low, high) in zip(flats, parts, strict=True)
        ]
        new = partial(_joined, source, flats[0].tensor.dtype, readers[share].dtype)
        return cls(first, np.concatenate(begins), new, partial(_side_by_side, old))


_Readers: TypeAlias = Mapping[int, Reader]


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


def _read(reader: Reader, start: int, stop: int) -> _Bits:
    return unsigned(reader.read(start, stop).cpu())


def _joined(arrays: Sequence[Any], dtype: torch.dtype, sent: Dtype) -> _Bits:
    """Bits of the source, side by side, as they are sent."""
    source = torch.frombuffer(bytearray().join(arrays), dtype=torch.uint8).view(dtype)
    return unsigned(WireReader.of(source, sent, name="source").read(0, len(source)))


def _side_by_side(arrays: Sequence[Any]) -> _Bits:
    return np.frombuffer(b"".join(arrays), arrays[0].dtype)
