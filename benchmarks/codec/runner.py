"""Measures every coder on every pair, one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.codec.bounds import bounds_of
from benchmarks.codec.change import Change, change_of, same
from benchmarks.codec.ours import OURS, Ours
from benchmarks.codec.pairs import Pair, pairs, read_pairs
from benchmarks.codec.record import CodecRecord
from benchmarks.codec.shapes import SHAPES
from benchmarks.timing import interleave

ROUNDS = {"full": 3, "quick": 3, "tiny": 1}


class Coder(Protocol):
    """Turns a change into bytes, and back."""

    @property
    def name(self) -> str: ...

    def encode(self, change: Change) -> Any:
        """Bytes, or (header, payload) of each frame."""
        ...

    def decode(self, data: Any, change: Change) -> Any:
        """(indices, new bits) of each tensor that changed, or all new bits of each."""
        ...


class LostBits(RuntimeError):
    """A coder did not give back what it was given."""


def coders() -> tuple[Coder, ...]:
    return (*OURS, *SHAPES)


def measure(
    scale: str, only: Sequence[str] = (), folder: Path | None = None
) -> Iterator[CodecRecord]:
    """Records of all pairs of a scale, or of those named. Raises LostBits.

    Pairs are made, or read where `folder` has them already.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for pair in read_pairs(scale, folder, only) if folder else pairs(scale, only):
            yield from measure_pair(pair, ROUNDS[scale])
    finally:
        torch.set_num_threads(before)


def measure_pair(pair: Pair, rounds: int) -> Iterator[CodecRecord]:
    """Records of all coders on one pair. Without a change there is nothing to measure."""
    change = change_of(pair)
    if not change.count:
        return
    bounds, chosen = bounds_of(change), coders()
    coded = {coder.name: coder.encode(change) for coder in chosen}
    for coder in chosen:
        _check(coder, coded[coder.name], change)
    encode = {coder.name: partial(coder.encode, change) for coder in chosen}
    decode = {coder.name: partial(coder.decode, coded[coder.name], change) for coder in chosen}
    encoding, decoding = (interleave(one, rounds=rounds) for one in (encode, decode))
    for coder in chosen:
        yield CodecRecord(
            kept=pair.kept,
            lr=pair.lr,
            steps=pair.steps,
            form=pair.form,
            numel=change.numel,
            dense_bytes=change.num_bytes,
            changed=change.count,
            coder=coder.name,
            is_ours=isinstance(coder, Ours),
            bytes=size_of(coded[coder.name]),
            encode_samples=tuple(encoding[coder.name]),
            decode_samples=tuple(decoding[coder.name]),
            bound_bytes=bounds.unknown,
            known_bound_bytes=bounds.known,
        )


def size_of(coded: bytes | list[tuple[bytes, bytes]]) -> int:
    """Bytes that travel."""
    if isinstance(coded, bytes):
        return len(coded)
    return sum(len(header) + len(payload) for header, payload in coded)


def _check(coder: Coder, coded: Any, change: Change) -> None:
    found, tensors = coder.decode(coded, change), change.tensors
    if isinstance(found[0], tuple):  # a tensor may be in two buckets
        indices, new = (np.concatenate(parts) for parts in zip(*found, strict=True))
        is_same = np.array_equal(indices, np.concatenate([t.indices for t in tensors]))
        is_same &= np.array_equal(new, np.concatenate([t.new for t in tensors]))
    else:
        is_same = same(found, [t.whole for t in tensors])
    if not is_same:
        raise LostBits(f"{coder.name}: what was decoded is not what was encoded")
