"""Hypothesis strategies of layouts, and of runs over them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.bits import Run, integer_dtype
from deltasync.wire.messages import ParameterSpec

Draw = Callable[[st.SearchStrategy[Any]], Any]

wire_dtypes = st.sampled_from(dtypes.DTYPES)


@st.composite
def layouts(draw: Draw, max_numel: int = 5000) -> tuple[ParameterSpec, ...]:
    """One to four parameters of one-dimensional shape; one may be empty."""
    numels = draw(st.lists(st.integers(0, max_numel), min_size=1, max_size=4))
    return tuple(
        ParameterSpec((f"p{i}",), (numel,), draw(wire_dtypes)) for i, numel in enumerate(numels)
    )


@st.composite
def runs(draw: Draw, specs: tuple[ParameterSpec, ...]) -> list[tuple[int, Run]]:
    """Ordered disjoint runs over `specs`, sparse and dense; perhaps none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for parameter, spec in enumerate(specs):
        cuts = draw(st.lists(st.integers(0, spec.numel), max_size=4).map(set))
        bounds = sorted(cuts | {0, spec.numel})
        for start, stop in pairwise(bounds):
            kind = draw(st.sampled_from(["absent", "sparse", "dense"]))
            if kind != "absent":
                count = draw(st.integers(1, stop - start))
                found.append(
                    (parameter, make_run(rng, spec, start, stop, count, dense=kind == "dense"))
                )
    return found


def make_run(
    rng: np.random.Generator,
    spec: ParameterSpec,
    start: int,
    stop: int,
    count: int,
    *,
    dense: bool,
) -> Run:
    """A run of random bits; `count` of its elements if it is sparse."""
    span = stop - start
    count = span if dense else count
    raw = torch.from_numpy(rng.integers(0, 256, count * spec.dtype.item_size, np.uint8))
    bits = raw.view(integer_dtype(spec.dtype))
    if dense:
        return Run(start, span, None, bits)
    chosen = np.sort(rng.choice(span, count, replace=False)).astype(np.int32)
    return Run(start, span, torch.from_numpy(chosen), bits)
