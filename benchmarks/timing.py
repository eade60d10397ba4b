"""Ratios that survive a busy machine: case and baseline take turns, round after round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch

_EVICTED_BYTES = 128 << 20  # more than the caches of common machines


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each function in each round; every other round runs in reverse order.

    Each runs once untimed. `before` runs, untimed, ahead of every call.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        before()
        function()
    gc.collect()
    for turn in range(rounds):
        names = list(functions)
        for name in names if turn % 2 == 0 else reversed(names):
            before()
            samples[name].append(_seconds(functions[name]))
    return samples


def cold_cache() -> Callable[[], None]:
    """A function that evicts the weights from the caches, as an engine that serves does."""
    memory = torch.zeros(_EVICTED_BYTES, dtype=torch.uint8)
    return lambda: void(memory.add_(1))


def void(_: object) -> None:
    """Run for the effect."""


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    kept = function()  # freeing what it returns is not its work
    seconds = time.perf_counter() - began
    del kept
    return seconds
