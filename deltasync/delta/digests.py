"""The ledger of digests: one number a chunk, kept up to date from patches in O(changed)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.kernels import KERNELS
from deltasync.delta.region import Region
from deltasync.delta.shard import Share
from deltasync.wire.digest import GOLDEN_RATIO, MASK, seed

Ints: TypeAlias = NDArray[np.int64]

Read = Callable[[int, int], Tensor]
"""(start, stop) -> int[stop - start], the bits of one parameter there."""

HeldPositions = Callable[[int, int], Tensor | None]
"""(start, stop) -> int64[k], which positions of one parameter there are held; None for all."""

Measure = Callable[[Ints], NDArray[np.uint64]]
"""(chunks) -> uint64[n], the digests of these chunks as they are in memory."""


def digest_text(digest: int) -> str:
    """A 64-bit digest as messages have it and people read it: 16 hexadecimal digits."""
    return f"{digest:016x}"


def cut(lengths: Ints, step: Ints | int) -> tuple[Ints, Ints]:
    """(which, begin): runs of these lengths cut into pieces of at most `step`."""
    pieces = -(-lengths // step)
    which = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return which, nth * (step if isinstance(step, int) else step[which])


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """All chunks of a layout, in order.

    Attributes:
        parameter: int64[chunks], the number of the parameter that a chunk is a part of.
        start: int64[chunks], flat position of its first element.
        numel: int64[chunks], its elements.
    """

    parameter: NDArray[np.int64]
    start: NDArray[np.int64]
    numel: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.parameter)


class DigestLedger:
    """State digests of parameters by chunk.

    Attributes:
        shares: What is digested: whole parameters, or shares of them. Numbers of parameters below
            are places in this.
        specs: Of which parameter each is.
        sums: uint64[chunks], all parameters' chunks one after another.
        first: int64[parameters + 1], where each parameter's chunks begin in `sums`.
        keys: uint64[parameters]: the digest seeds, at the first element of what is digested.
        numbers, starts, cols, gaps: int64[parameters]: the number of the layout's parameter, and
            where the region of it begins, and its rows.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        chunk_numel: int,
        held: Collection[int] | None = None,
    ) -> None:
        """All digests are 0.

        Args:
            shares: What is digested; `shard.whole` makes them of a layout.
            chunk_numel: Elements in a chunk.
            held: Numbers of the parameters to keep digests of; None for all.
        """
        self.shares = tuple(shares)
        self.specs = tuple(share.spec for share in shares)
        self.chunk_numel = chunk_numel
        chunks = [
            -(-share.numel // chunk_numel) if held is None or number in held else 0
            for number, share in enumerate(shares)
        ]
        self.first: NDArray[np.int64] = np.cumsum([0, *chunks], dtype=np.int64)
        self.sums: NDArray[np.uint64] = np.zeros(int(self.first[-1]), np.uint64)
        # Positions in a region count from its start.
        keys = [(seed(s.spec.name) + s.region.start * GOLDEN_RATIO) & MASK for s in shares]
        self.keys: NDArray[np.uint64] = np.array(keys, np.uint64)
        columns = [(s.number, s.region.start, s.cols, s.gap) for s in shares]
        self.numbers, self.starts, self.cols, self.gaps = (
            np.array(columns, np.int64).reshape(-1, 4).T
        )
        self._gaps = {n: Region(0, s.region.dims) for n, s in enumerate(shares) if s.gap}

    def copy(self) -> Self:
        """A ledger of the same parameters that can be changed apart."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, sums=self.sums.copy())
        return other

    def changed_since(self, before: DigestLedger) -> set[int]:
        """Numbers of the layout's parameters of which a chunk is another."""
        chunks = np.flatnonzero(self.sums != before.sums)
        return set(self.numbers[self.table.parameter[chunks]].tolist())

    @cached_property
    def table(self) -> ChunkTable:
        """Where the chunks of `sums` lie."""
        parameter = np.repeat(np.arange(len(self.specs)), np.diff(self.first))
        start = (np.arange(len(parameter)) - self.first[parameter]) * self.chunk_numel
        numels = np.array([share.numel for share in self.shares], np.int64)
        return ChunkTable(parameter, start, np.minimum(self.chunk_numel, numels[parameter] - start))

    @cached_property
    def item_sizes(self) -> NDArray[np.int64]:
        """int64[parameters]: bytes of an element."""
        return np.array([spec.dtype.item_size for spec in self.specs], np.int64)

    @property
    def total(self) -> int:
        """The digest of all parameters together."""
        return int(self.sums.sum()) & MASK

    def by_parameter(self) -> NDArray[np.uint64]:
        """uint64[parameters]: the digest of each; 0 for what is not held."""
        found = np.zeros(len(self.specs), np.uint64)
        np.add.at(found, self.table.parameter, self.sums)
        return found

    def digest_of(self, copies: NDArray[np.uint64] | None) -> int:
        """The digest of so many copies of each parameter; None for one of each.

        Args:
            copies: uint64[parameters of the layout].
        """
        if copies is None:
            return self.total
        each = np.repeat(copies[self.numbers], np.diff(self.first))
        return int((each * self.sums).sum()) & MASK

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(chunk, low, high): the pieces of elements [start, stop) of a parameter, by chunk."""
        for chunk in range(start // self.chunk_numel, -(-stop // self.chunk_numel)):
            low = chunk * self.chunk_numel
            yield chunk, max(low, start), min(low + self.chunk_numel, stop)

    def digest_run(self, parameter: int, bits: Tensor, start: int) -> int:
        """The digest of int[n] consecutive elements of a parameter."""
        if parameter in self._gaps:
            positions = torch.arange(start, start + len(bits), device=bits.device)
            return self.digest_at(parameter, positions, bits)
        return KERNELS[bits.device.type].digest_run(bits, int(self.keys[parameter]), start)

    def digest_at(self, parameter: int, positions: Tensor, bits: Tensor) -> int:
        """The digest of int[n] elements at increasing int64[n] flat positions."""
        _, sums = self._digest_chunks(parameter, positions, bits)
        return int(sums.sum()) & MASK

    def measure(
        self,
        parameter: int,
        read: Read,
        *,
        start: int = 0,
        stop: int | None = None,
        held: HeldPositions = lambda start, stop: None,
    ) -> None:
        """Compute a parameter's digests from scratch: all, or of whole chunks [start, stop).

        Only what is `held` of the bits that are read counts.
        """
        first = int(self.first[parameter])
        stop = self.shares[parameter].numel if stop is None else stop
        for chunk, low, high in self.chunks(start, stop):
            bits, positions = read(low, high), held(low, high)
            if positions is not None:
                bits = bits[positions - low]
            self.sums[first + chunk] = self.digest_held(parameter, positions, bits, low)

    def digest_held(
        self, parameter: int, positions: Tensor | None, bits: Tensor, start: int
    ) -> int:
        """The digest of bits at int64[n] positions, or of a run; none have the digest 0."""
        if positions is None:
            return self.digest_run(parameter, bits, start)
        return self.digest_at(parameter, positions, bits) if len(positions) else 0

    def replace_sparse(self, parameter: int, positions: Tensor, old: Tensor, new: Tensor) -> int:
        """Account for int[n] `old` bits becoming `new` at increasing int64[n] flat positions.

        Returns the digest of the new bits. n is at least 1.
        """
        first, gained = self._digest_chunks(parameter, positions, new)
        _, lost = self._digest_chunks(parameter, positions, old)
        begin = int(self.first[parameter]) + first
        self.sums[begin : begin + len(gained)] += gained - lost
        return int(gained.sum()) & MASK

    def _digest_chunks(
        self, parameter: int, positions: Tensor, bits: Tensor
    ) -> tuple[int, NDArray[np.uint64]]:
        """(first chunk, uint64[chunks]): digests of elements at increasing positions, by chunk."""
        kernels, key = KERNELS[bits.device.type], int(self.keys[parameter])
        if (region := self._gaps.get(parameter)) is None:
            return kernels.digest_chunks(positions, bits, key, self.chunk_numel)
        first, last = (int(positions[n]) // self.chunk_numel for n in (0, -1))
        ends = torch.arange(first + 1, last + 1, device=positions.device) * self.chunk_numel
        cuts = [0, *torch.searchsorted(positions, ends).tolist(), len(positions)]
        sums = np.zeros(last + 1 - first, np.uint64)
        for chunk, (low, high) in enumerate(pairwise(cuts)):
            if low < high:
                there = region.places(positions[low:high])
                _, found = kernels.digest_chunks(there, bits[low:high], key, self.chunk_numel)
                sums[chunk] = found.sum()
        return first, sums

    def replace_dense(self, parameter: int, start: int, new: Tensor, read_old: Read) -> int:
        """Account for int[n] `new` bits taking the place of what stands at `start`.

        Whole chunks are digested again; `read_old` is asked only at ragged ends. Returns the
        digest of the new bits.
        """
        first, numel = int(self.first[parameter]), self.shares[parameter].numel
        total = 0
        for chunk, low, high in self.chunks(start, start + len(new)):
            gained = self.digest_run(parameter, new[low - start : high - start], low)
            total += gained
            if high - low == min(self.chunk_numel, numel - chunk * self.chunk_numel):
                self.sums[first + chunk] = gained
            else:
                lost = self.digest_run(parameter, read_old(low, high), low)
                change = np.uint64((gained - lost) & MASK)
                self.sums[first + chunk : first + chunk + 1] += change
        return total & MASK
