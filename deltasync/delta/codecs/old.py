"""The old bits of a payload's rows, by which codecs tell new ones, at both ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Live
from deltasync.delta.codecs.base import Bits, Indices, unsigned_dtype
from deltasync.delta.shard import Share
from deltasync.wire.messages import ParameterSpec

_BLOCK = 1 << 17  # indices widened at once

Old: TypeAlias = tuple[Bits, bool]
"""(unsigned[n], whether all of them are known): what is held elsewhere is 0."""


class OldRows(Protocol):
    """The bits that the elements of a payload's rows have before it is applied.

    `row` is a row's place in the payload, `parameter` its number in the layout; positions are those
    of the layout.
    """

    def spec(self, row: int, parameter: int) -> ParameterSpec: ...

    def at(self, row: int, parameter: int, start: int, indices: Indices) -> Old | None:
        """Of the elements at int32[n] strictly increasing indices from `start` on.

        None if no element of the parameter is known.
        """
        ...

    def run(self, row: int, parameter: int, start: int, stop: int) -> Old | None:
        """Of all elements from `start` to `stop`, in memory of their own; None likewise."""
        ...


@dataclass(frozen=True, slots=True)
class LiveOld:
    """At a receiver: what its weights hold.

    Attributes:
        specs: The layout.
        flats: The weights by parameter; not owned.
    """

    specs: Sequence[ParameterSpec]
    flats: Mapping[int, Live]

    def spec(self, row: int, parameter: int) -> ParameterSpec:
        return self.specs[parameter]

    def at(self, row: int, parameter: int, start: int, indices: Indices) -> Old | None:
        flat = self.flats.get(parameter)
        if flat is None:
            return None
        is_whole, device = flat.held(0, 0) is None, flat.line.device

        def bits_at(positions: Tensor) -> Tensor:
            there = positions.to(device)
            kept = None if is_whole else flat.keeps(there)
            if kept is None:
                return flat.gather(there)
            found = torch.zeros(len(there), dtype=flat.line.dtype, device=device)
            found[kept] = flat.gather(there[kept])
            return found

        return _gathered(bits_at, self.specs[parameter], start, indices), is_whole

    def run(self, row: int, parameter: int, start: int, stop: int) -> Old | None:
        flat = self.flats.get(parameter)
        if flat is None:
            return None
        kind, held = unsigned_dtype(self.specs[parameter].dtype), flat.held(start, stop)
        bits = flat.read(start, stop) if held is None else flat.gather(held)
        host = bits.cpu().numpy().view(kind)
        if held is None:
            return host.copy(), True
        found = np.zeros(stop - start, kind)
        found[held.cpu().numpy() - start] = host
        return found, False


@dataclass(frozen=True, slots=True)
class SnapshotOld:
    """At a sender: what its snapshot holds, which may be shares of parameters.

    Attributes:
        shares: What the snapshot holds of which parameters.
        flats: The bits of each of these; not owned.
        numbers: int64[rows], to which of them each row of the payload belongs.
        is_there: bool[rows], whether the snapshot still has the row's old bits.
    """

    shares: Sequence[Share]
    flats: Mapping[int, Live]
    numbers: NDArray[np.int64]
    is_there: NDArray[np.bool_]

    def spec(self, row: int, parameter: int) -> ParameterSpec:
        return self.shares[int(self.numbers[row])].spec

    def at(self, row: int, parameter: int, start: int, indices: Indices) -> Old | None:
        if not self.is_there[row]:
            return None
        share, flat = self._held(row)
        region = share.region

        def bits_at(positions: Tensor) -> Tensor:
            inside = positions - region.start if not share.gap else region.find(positions)[1]
            return flat.gather(inside.to(flat.line.device))

        return _gathered(bits_at, share.spec, start, indices), True

    def run(self, row: int, parameter: int, start: int, stop: int) -> Old | None:
        if not self.is_there[row]:
            return None
        share, flat = self._held(row)
        are_inside, numbers = share.region.find(torch.tensor([start, stop - 1], device="cpu"))
        first, last = numbers.tolist()
        if not bool(are_inside.all()) or last - first != stop - 1 - start:
            return None
        bits = flat.read(first, last + 1).cpu().numpy().copy()
        return bits.view(unsigned_dtype(share.spec.dtype)), True

    def _held(self, row: int) -> tuple[Share, Live]:
        number = int(self.numbers[row])
        return self.shares[number], self.flats[number]


def _gathered(
    bits_at: Callable[[Tensor], Tensor], spec: ParameterSpec, start: int, indices: Indices
) -> Bits:
    found = np.empty(len(indices), unsigned_dtype(spec.dtype))
    for begin in range(0, len(indices), _BLOCK):
        positions = indices[begin : begin + _BLOCK].astype(np.int64)
        positions += start
        bits = bits_at(torch.from_numpy(positions)).cpu().numpy()
        found[begin : begin + _BLOCK] = bits.view(found.dtype)
    return found
