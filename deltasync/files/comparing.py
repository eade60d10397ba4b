"""Comparison of two checkpoints in two threads; nothing is kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

_THREADS = 2

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def no_phase(_: str, __: int) -> Advance:
    """Report nothing."""
    return lambda done: None


def compare_checkpoints(
    old: Checkpoint, new: Checkpoint, *, advance: Advance = lambda num_bytes: None
) -> dict[str, Sparsity]:
    """Return how each tensor differs, by name.

    Args:
        old: What receivers hold.
        new: What they are to get.
        advance: Called to report progress.

    Raises:
        LayoutMismatch: Names, shapes or dtypes differ.
    """
    check_same_tensors(old.specs, new.specs)

    def measured(name: str) -> Sparsity:
        return sparsity(old.tensor(name), new.tensor(name))

    found = dict[str, Sparsity]()
    for name, one in in_threads(measured, old.specs):
        found[name] = one
        advance(old.specs[name].numel * old.specs[name].dtype.item_size)
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
    for group, sums in in_threads(held.measure, groups):
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
    work: Callable[[_Item], _Found], items: Iterable[_Item]
) -> Iterator[tuple[_Item, _Found]]:
    """Yield (item, result of `work`) in order; two items are in work at a time."""
    chosen = list(items)
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from zip(chosen, pool.map(work, chosen), strict=True)
