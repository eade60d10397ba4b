"""Ratios that survive a busy machine: case and baseline take turns, round after round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of each function in each round; every other round runs in reverse order.

    Each runs once untimed.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    gc.collect()
    for turn in range(rounds):
        names = list(functions)
        for name in names if turn % 2 == 0 else reversed(names):
            samples[name].append(_seconds(functions[name]))
    return samples


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    kept = function()  # freeing what it returns is not its work
    seconds = time.perf_counter() - began
    del kept
    return seconds
