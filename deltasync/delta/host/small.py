"""Small tensors in host memory, read side by side: calls for each cost more than its elements.

A model with thousands of them leaves most unchanged in a sync. What is joined here is compared and
digested by one call for hundreds; the loops over tensors run in C.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Live, dtype_of
from deltasync.delta.digests import DigestLedger, Ints
from deltasync.delta.kernels.host import digest_pieces, unsigned
from deltasync.delta.readers import Reader, WireReader
from deltasync.dtypes import Dtype

SMALL = 1 << 12
"""Elements up to which reading side by side pays."""

_TOGETHER = 1 << 15  # elements joined at once: they stay in the L2 cache
_Bits: TypeAlias = NDArray[Any]


def is_small(flat: Live) -> bool:
    """Whether it can be read side by side with others."""
    return 0 < flat.numel <= SMALL and flat.is_contiguous and flat.line.is_cpu


class SmallSource:
    """Small parameters of a source, and the copies that they are compared with.

    Attributes:
        others: int64[n], increasing: numbers of the parameters that have to be compared one by one.
    """

    def __init__(self, readers: Sequence[Reader], old: Mapping[int, Live]) -> None:
        """Neither is owned: addresses of readers must not change while this is used."""
        kinds: dict[tuple[torch.dtype, Dtype], list[int]] = {}
        others = list[int]()
        for number, reader in enumerate(readers):
            flat = reader.flat
            if flat is not None and is_small(flat) and is_small(old[number]):
                kinds.setdefault((flat.tensor.dtype, reader.dtype), []).append(number)
            else:
                others.append(number)
        self.others = np.array(others, np.int64)
        self._groups = [
            _Group.of(kind, numbers[part], readers, old)
            for kind, numbers in kinds.items()
            for part in _parts(np.array([readers[number].numel for number in numbers]))
        ]

    def differing(self) -> Ints:
        """int64[n]: numbers of those that are small and differ, in any order."""
        return np.concatenate([np.zeros(0, np.int64), *(one.differing() for one in self._groups)])


@dataclass(frozen=True, slots=True)
class _Group:
    """Small parameters that are compared at once.

    Attributes:
        numbers: int64[k], which.
        ends: int64[k], where each ends among the elements of all.
        kind: The dtypes of the source, and of what is sent.
        new, old: Elements in the source, and in the copies; one array of copies side by side.
    """

    numbers: Ints
    ends: Ints
    kind: tuple[torch.dtype, Dtype]
    new: list[_Bits]
    old: list[_Bits]

    @classmethod
    def of(
        cls,
        kind: tuple[torch.dtype, Dtype],
        numbers: list[int],
        readers: Sequence[Reader],
        old: Mapping[int, Live],
    ) -> _Group:
        flats = [flat for number in numbers if (flat := readers[number].flat) is not None]
        ends = np.cumsum([flat.numel for flat in flats])
        news = [unsigned(flat.line) for flat in flats]
        return cls(np.array(numbers), ends, kind, news, _lines([old[n].line for n in numbers]))

    def differing(self) -> Ints:
        """int64[n]: numbers of those that differ."""
        old = self.old[0]
        if len(self.old) > 1:
            old = np.frombuffer(_joined(self.old), old.dtype)
        ends = self.ends.searchsorted(np.flatnonzero(self._sent() != old), "right")
        found: Ints = self.numbers[np.unique(ends)]
        return found

    def _sent(self) -> _Bits:
        """The source's elements as they are sent."""
        (dtype, sent), joined = self.kind, _joined(self.new)
        source = torch.frombuffer(joined, dtype=torch.uint8).view(dtype)
        if dtype_of(source) == sent:
            return np.frombuffer(joined, self.new[0].dtype)
        return unsigned(WireReader.of(source, sent, name="source").read(0, len(source)))


def _joined(arrays: Iterable[Any]) -> bytearray:
    """The bytes of arrays, one after another."""
    return bytearray().join(arrays)


def _lines(lines: list[Tensor]) -> list[_Bits]:
    """The same elements; in one array if they lie one after another."""
    size, first = lines[0].element_size(), lines[0]
    begins = first.data_ptr() + size * np.cumsum([0, *(line.numel() for line in lines)])
    is_one = {line.untyped_storage()._cdata for line in lines} == {first.untyped_storage()._cdata}
    if is_one and [line.data_ptr() for line in lines] == begins[:-1].tolist():
        return [unsigned(first.as_strided(((begins[-1] - begins[0]) // size,), (1,)))]
    return list(map(unsigned, lines))


class SmallWeights:
    """Small parameters, each of them one chunk of a ledger, and their digests.

    Attributes:
        has: bool[parameters], which they are.
    """

    def __init__(self, flats: Mapping[int, Live], ledger: DigestLedger) -> None:
        """The weights are not owned."""
        self._ledger = ledger
        is_one = (np.diff(ledger.first) == 1) & (ledger.gaps == 0)
        self._lines: dict[int, _Bits] = {
            number: unsigned(flat.line)
            for number, flat in flats.items()
            if is_one[number] and is_small(flat)
        }
        self._item_sizes = np.zeros(len(is_one), np.int64)
        for number, line in self._lines.items():
            self._item_sizes[number] = line.itemsize
        self.has = self._item_sizes > 0

    def digests(self, parameters: Ints) -> NDArray[np.uint64]:
        """uint64[n]: those of int64[n] parameters, read from memory."""
        ledger, found = self._ledger, np.zeros(len(parameters), np.uint64)
        numels = ledger.table.numel[ledger.first[parameters]]
        item_sizes = self._item_sizes[parameters]
        for size in np.unique(item_sizes).tolist():
            these = np.flatnonzero(item_sizes == size)
            for part in _parts(numels[these]):
                here = these[part]
                found[here] = self._digests(parameters[here], numels[here], size)
        return found

    def _digests(self, parameters: Ints, numels: Ints, item_size: int) -> NDArray[np.uint64]:
        """uint64[n]: digests of parameters with elements of so many bytes."""
        joined = _joined(map(self._lines.__getitem__, parameters.tolist()))
        cuts = np.append(0, np.cumsum(numels))
        positions = np.arange(cuts[-1]) - np.repeat(cuts[:-1], numels)
        bits = np.frombuffer(joined, f"u{item_size}")
        return digest_pieces(positions, bits, self._ledger.keys[parameters], cuts)


def _parts(numels: Ints) -> Iterator[slice]:
    """Of small parameters with so many elements, those that are joined at once."""
    nth = np.cumsum(numels) // _TOGETHER
    cuts = [0, *(np.flatnonzero(np.diff(nth)) + 1).tolist(), len(numels)]
    yield from (slice(low, high) for low, high in pairwise(cuts) if low < high)
