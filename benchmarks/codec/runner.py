"""Measures every coder on every pair, one thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch

from benchmarks.codec.change import Change, change_of, same
from benchmarks.codec.ours import OURS, Ours
from benchmarks.codec.pairs import Pair, pairs
from benchmarks.codec.shapes import BASELINE, SHAPES, DenseXor, Shape
from benchmarks.record import PER_CHANGE, Result
from benchmarks.timing import interleave

ROUNDS = {"full": 3, "quick": 3, "tiny": 1}
GOAL_NUMEL = 100_000_000  # goals are for models of this size or more
GOALS = {
    ("deltasync: gap, ulp, zstd", "masters-1e-6-k1"): 1.42,
    ("deltasync: class", "masters-1e-6-k1"): 1.02,
    ("deltasync: gap, ulp, zstd", "masters-3e-6-k1"): 1.20,
    ("deltasync: class", "masters-3e-6-k1"): 0.95,
}
"""The most bytes per change, by coder and pair."""


Coder = Ours | Shape | DenseXor
"""Turns a change into bytes, and back."""


class LostBits(RuntimeError):
    """A coder did not give back what it was given."""


def measure(scale: str, only: Sequence[str] = ()) -> Iterator[Result]:
    """Records of all pairs of a scale, or of those named. Raises LostBits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for pair in pairs(scale, only):
            yield from measure_pair(pair, ROUNDS[scale])
    finally:
        torch.set_num_threads(before)


def measure_pair(pair: Pair, rounds: int) -> Iterator[Result]:
    """Records of all coders on one pair. Without a change there is nothing to measure.

    `samples` are of encoding; `parts` has seconds of decoding, and how many times as fast as the
    baseline both are, by rounds; `bound_bytes` are those of the weights.
    """
    change = change_of(pair)
    if not change.count:
        return
    coders: tuple[Coder, ...] = (*OURS, *SHAPES)
    coded: dict[str, Any] = {coder.name: coder.encode(change) for coder in coders}
    for coder in coders:
        _check(coder, coded[coder.name], change)
    encode = {coder.name: partial(coder.encode, change) for coder in coders}
    decode = {coder.name: partial(coder.decode, coded[coder.name], change) for coder in coders}
    encoding, decoding = (interleave(one, rounds=rounds) for one in (encode, decode))
    for name, data in coded.items():
        num_bytes = size_of(data)
        goal = GOALS.get((name, pair.name)) if change.numel >= GOAL_NUMEL else None
        yield Result(
            case="codec",
            way=name,
            model=pair.name,
            numel=change.numel,
            parameters=len(change.specs),
            density=change.count / change.numel,
            changed=change.count,
            seconds=median(encoding[name]),
            samples=tuple(encoding[name]),
            baseline=BASELINE,
            baseline_seconds=median(encoding[BASELINE]),
            baseline_samples=tuple(encoding[BASELINE]),
            ratio=num_bytes / change.count,
            ratio_is=PER_CHANGE,
            goal=goal,
            met=goal is None or num_bytes <= goal * change.count,
            bytes=num_bytes,
            bound_bytes=change.num_bytes,
            parts={
                "decode_s": median(decoding[name]),
                "encode_ratio": _ratio(encoding, name),
                "decode_ratio": _ratio(decoding, name),
            },
        )


def _ratio(samples: dict[str, list[float]], name: str) -> float:
    return median(b / s for b, s in zip(samples[BASELINE], samples[name], strict=True))


def size_of(coded: bytes | list[tuple[bytes, bytes]]) -> int:
    """Bytes that travel."""
    if isinstance(coded, bytes):
        return len(coded)
    return sum(len(header) + len(payload) for header, payload in coded)


def _check(coder: Coder, coded: Any, change: Change) -> None:
    found: Any = coder.decode(coded, change)
    match coder:
        case Ours():
            wanted = [payload.numpy() for payload, _ in change.payloads]
        case DenseXor():
            wanted = [tensor.whole for tensor in change.tensors]
        case Shape():
            found = [*chain(*found)]
            wanted = [*chain(*((tensor.indices, tensor.new) for tensor in change.tensors))]
    if not same(found, wanted):
        raise LostBits(f"{coder.name}: what was decoded is not what was encoded")
