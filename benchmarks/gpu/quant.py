"""Engines that serve quantized weights: whole syncs to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.cases import Run, parts_of, sizes_of
from benchmarks.gpu.pair import open_pair
from benchmarks.record import SPEED_UP, Result

_DENSITY = 0.003


def quant(run: Run) -> Iterator[Result]:
    """Whole syncs to block FP8 beside those of bfloat16."""
    done: dict[str, tuple[list[float], dict[str, Any], dict[str, float]]] = {}
    for form in ("", "block FP8"):
        with open_pair(run.engine, run.setup.geometry, form=form) as pair:
            syncs = run.syncs(pair, run.changes(pair, _DENSITY))
            pair.check()
            parts = parts_of([one.stats for one in syncs])
            done[form] = [s.seconds for s in syncs], sizes_of(pair, syncs, _DENSITY), parts
    (theirs, other, _), (mine, sizes, parts) = done.values()
    yield run.record(
        "quant_sync",
        mine,
        theirs,
        ratio_is=SPEED_UP,
        baseline="the same changes to an engine that serves bfloat16",
        bound_bytes=other["bytes"],
        parts=parts,
        **sizes,
    )
