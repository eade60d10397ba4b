"""Comparison of two checkpoints, piece by piece in two threads; nothing is kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from deltasync.delta.bits import Flat
from deltasync.delta.detector import HostSnapshot
from deltasync.delta.ledger import Ledger, digest_text
from deltasync.delta.shard import whole
from deltasync.delta.tiles import Space
from deltasync.errors import DigestMismatch
from deltasync.files.checkpoint import Checkpoint, check_same_tensors
from deltasync.files.sparsity import Sparsity, sparsity

Advance = Callable[[int], None]
"""Called with the bytes of the (first) checkpoint that were done since the last call."""

Phase = Callable[[str, int], Advance]
"""Called with the name of a phase and its total; returns what to call with its progress."""

_PIECE_BYTES = 16 << 20  # of one checkpoint
_RELEASED = 8  # pieces after which memory is released
_THREADS = 2

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def no_phase(_: str, __: int) -> Advance:
    """Report nothing."""
    return lambda done: None


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one tensor."""

    name: str
    start: int
    stop: int
    num_bytes: int


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
    for piece, one in in_threads(measured, _pieces(old), old, new):
        found[piece.name] += one
        advance(piece.num_bytes)
    return found


def lines_of(checkpoint: Checkpoint, space: Space) -> list[Tensor]:
    """int[numel] of each share of its whole layout, as it lies in its file."""
    return [Flat.of(checkpoint.tensor(share.spec.name)).line for share in space.shares]


def measure_digests(checkpoint: Checkpoint, *, advance: Advance = lambda num_bytes: None) -> Ledger:
    """Return the state digests of a checkpoint, by chunk."""
    space = Space(whole(checkpoint.layout))
    ledger, held = Ledger(space), HostSnapshot(space, lines_of(checkpoint, space))
    num_bytes = np.bincount(
        space.chunk, space.numel * space.item_size[space.share], space.num_chunks
    )
    groups = np.array_split(np.arange(space.num_chunks), max(1, space.num_chunks // 8))
    for group, sums in in_threads(held.measure, groups, checkpoint):
        ledger.sums[group] = sums
        advance(int(num_bytes[group].sum()))
    return ledger


def check_digest(
    checkpoint: Checkpoint, digest: int, fault: str, *, phase: Phase = no_phase
) -> None:
    """Read all of a checkpoint. Raises DigestMismatch, with the fault, for another state digest."""
    advance = phase("verifying", checkpoint.num_bytes)
    if (there := measure_digests(checkpoint, advance=advance).total) != digest:
        raise DigestMismatch(
            f"{fault}: its state digest is {digest_text(there)}, {digest_text(digest)} is expected"
        )


def in_threads(
    work: Callable[[_Item], _Found], items: Iterable[_Item], *checkpoints: Checkpoint
) -> Iterator[tuple[_Item, _Found]]:
    """Yield (item, result of `work`) in order; two items are in work at a time.

    The memory that checkpoints were read into is released meanwhile.
    """
    chosen = list(items)
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, found in enumerate(zip(chosen, pool.map(work, chosen), strict=True)):
            yield found
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
