"""Comparison of two checkpoints, piece by piece in two threads; nothing is kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Flat, as_bits
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import HostBackend
from deltasync.delta.patch import CHUNK_NUMEL
from deltasync.delta.shard import whole
from deltasync.delta.sparsity import Sparsity, sparsity
from deltasync.files.checkpoint import Checkpoint, check_same_tensors

Advance = Callable[[int], None]
"""Called with the bytes of the (first) checkpoint that were done since the last call."""

_PIECE_BYTES = 16 << 20  # of one checkpoint
_RELEASED = 8  # pieces after which memory is released
_THREADS = 2

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one tensor."""

    name: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An element that differs.

    Attributes:
        name: Name of its tensor.
        index: Its index there.
        old, new: Its values as text, and as bits in hexadecimal.
    """

    name: str
    index: tuple[int, ...]
    old: tuple[str, str]
    new: tuple[str, str]


@dataclass(slots=True)
class Equality:
    """Whether two checkpoints are equal bit for bit.

    Attributes:
        numel: Elements compared.
        different: By tensor, how many elements differ, if any.
        first: The first of those elements.
    """

    numel: int = 0
    different: dict[str, int] = field(default_factory=dict)
    first: list[Mismatch] = field(default_factory=list)


def compare_checkpoints(
    old: Checkpoint,
    new: Checkpoint,
    *,
    exponents: bool = False,
    encodings: bool = True,
    advance: Advance = lambda num_bytes: None,
) -> dict[str, Sparsity]:
    """Return how each tensor differs, by name.

    Args:
        old: What receivers hold.
        new: What they are to get.
        exponents: As in `sparsity`.
        encodings: Likewise.
        advance: Called to report progress.

    Raises:
        LayoutMismatch: Names, shapes or dtypes differ.
    """
    check_same_tensors(old.specs, new.specs)

    def measured(piece: Piece) -> Sparsity:
        before, after = (_elements(one, piece) for one in (old, new))
        return sparsity(before, after, exponents=exponents, encodings=encodings)

    found = {name: Sparsity() for name in old.specs}
    for piece, one in _by_piece(measured, (old, new), advance):
        found[piece.name] += one
    return found


def compare_bits(
    old: Checkpoint,
    new: Checkpoint,
    *,
    limit: int = 10,
    advance: Advance = lambda num_bytes: None,
) -> Equality:
    """Return whether they are equal bit for bit, with the first `limit` elements that differ.

    Raises:
        LayoutMismatch: Names, shapes or dtypes differ.
    """
    check_same_tensors(old.specs, new.specs)

    def differing(piece: Piece) -> tuple[int, list[int]]:
        before, after = (as_bits(_elements(one, piece)).numpy() for one in (old, new))
        if np.array_equal(before, after):
            return 0, []
        where = np.flatnonzero(before != after)
        return len(where), (where[:limit] + piece.start).tolist()

    found = Equality()
    for piece, (count, first) in _by_piece(differing, (old, new), advance):
        found.numel += piece.stop - piece.start
        if count:
            found.different[piece.name] = found.different.get(piece.name, 0) + count
        for position in first[: limit - len(found.first)]:
            found.first.append(_mismatch(old, new, piece.name, position))
    return found


def measure_digests(
    checkpoint: Checkpoint, *, advance: Advance = lambda num_bytes: None
) -> DigestLedger:
    """Return the state digests of a checkpoint, by chunk."""
    flats = {n: Flat.of(checkpoint.tensor(name)) for n, name in enumerate(checkpoint.specs)}
    ledger = DigestLedger(whole(checkpoint.layout), chunk_numel=CHUNK_NUMEL)
    backend, table, item_sizes = HostBackend(flats, ledger), ledger.table, ledger.item_sizes
    groups = np.array_split(np.arange(len(table)), max(1, len(table) // 8))
    pairs = in_threads(backend.measure, groups)
    for number, (group, sums) in enumerate(pairs):
        ledger.sums[group] = sums
        advance(int((table.numel[group] * item_sizes[table.parameter[group]]).sum()))
        if number % _RELEASED == 0:
            checkpoint.release()
    return ledger


def in_threads(
    work: Callable[[_Item], _Found], items: Iterable[_Item]
) -> Iterator[tuple[_Item, _Found]]:
    """Yield (item, result of `work`) in order; two items are in work at a time."""
    chosen = list(items)
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from zip(chosen, pool.map(work, chosen), strict=True)


def _by_piece(
    work: Callable[[Piece], _Found], checkpoints: tuple[Checkpoint, Checkpoint], advance: Advance
) -> Iterator[tuple[Piece, _Found]]:
    for number, (piece, found) in enumerate(in_threads(work, _pieces(checkpoints[0]))):
        yield piece, found
        advance(piece.num_bytes)
        if number % _RELEASED == 0:
            for checkpoint in checkpoints:
                checkpoint.release()


def _pieces(checkpoint: Checkpoint) -> Iterator[Piece]:
    for name, spec in checkpoint.specs.items():
        step = _PIECE_BYTES // spec.dtype.item_size
        for start in range(0, spec.numel, step):
            stop = min(start + step, spec.numel)
            yield Piece(name, start, stop, (stop - start) * spec.dtype.item_size)


def _elements(checkpoint: Checkpoint, piece: Piece) -> Tensor:
    return checkpoint.tensor(piece.name).view(-1)[piece.start : piece.stop]


def _mismatch(old: Checkpoint, new: Checkpoint, name: str, position: int) -> Mismatch:
    index = np.unravel_index(position, old.specs[name].shape or (1,))
    texts = [_texts(one.tensor(name).view(-1)[position : position + 1]) for one in (old, new)]
    shape = tuple(map(int, index)) if old.specs[name].shape else ()
    return Mismatch(name, shape, texts[0], texts[1])


def _texts(element: Tensor) -> tuple[str, str]:
    """(value, bits) of one element."""
    bits = as_bits(element).numpy().view(f"u{element.element_size()}")
    value = element if element.dtype in _PRINTED else element.to(torch.float32)
    return str(value.item()), f"0x{int(bits[0]):0{2 * element.element_size()}x}"


_PRINTED = frozenset(
    {torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
    | {torch.uint16, torch.uint32, torch.uint64, torch.float64, torch.complex64}
)
