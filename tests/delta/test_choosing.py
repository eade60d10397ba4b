"""The coding of the least predicted time: the slower the link, the fewer the bytes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.delta.codecs.choosing import (
    CODING_COSTS,
    Work,
    cheapest,
    predicted_s,
    sent_bytes,
)
from deltasync.store.folding import FoldedPlan

CPU = CODING_COSTS["cpu"]
SPEEDS = [float(one) for one in np.logspace(3, 12, 400)]  # bytes a second


def work(density: float, numel: int = 100_000_000) -> Work:
    """Of a delta of bfloat16 weights, all sparse."""
    changes = density * numel
    return Work(changes, numel, int(6 * changes), 6 * changes, is_full=False)


def full(numel: int) -> Work:
    return Work(numel, numel, 2 * numel, 2 * numel, is_full=True)


def plan(sparse_bytes: int, dense_bytes: int) -> FoldedPlan:
    """A delta of these sizes, without anything in it."""
    made = FoldedPlan.of((), (), base_version=1, digest=0)
    made.sparse_bytes, made.dense_bytes = sparse_bytes, dense_bytes
    return made


WORKS = st.one_of(
    st.builds(full, st.integers(1, 1 << 40)),
    st.builds(work, st.floats(1e-7, 1), st.integers(1, 1 << 40)),
    st.builds(
        lambda sparse, dense, numel: Work.of(plan(sparse, dense), numel, 2 * numel),
        st.integers(0, 1 << 30),
        st.integers(0, 1 << 30),
        st.integers(1, 1 << 31),
    ),
)


@given(work=WORKS, speeds=st.tuples(st.floats(1, 1e15), st.floats(1, 1e15)))
def test_a_slower_link_never_gets_more_bytes(work: Work, speeds: tuple[float, float]) -> None:
    slow, fast = sorted(speeds)
    chosen = [cheapest(work, speed, CPU) for speed in (slow, fast)]
    taken = [sent_bytes(coding, work, CPU) for coding in chosen]
    assert taken[0] <= taken[1] * (1 + 1e-9)
    for coding, speed in zip(chosen, (slow, fast), strict=True):
        known = CPU.whole if work.is_full else CPU.deltas
        least = min(predicted_s(one, work, speed, CPU) for one in known)
        assert predicted_s(coding, work, speed, CPU) == least


@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5])
def test_codings_switch_once_each_way(density: float) -> None:
    found = [cheapest(work(density), speed, CPU) for speed in SPEEDS]
    chosen = [coding for coding, _ in itertools.groupby(found)]
    assert len(set(chosen)) == len(chosen)
    assert [coding for coding in chosen if coding != "zstd"] == ["class", "gap", "none"]
    assert cheapest(work(density), math.inf, CPU) == "none"


def test_full_syncs_are_compressed_on_slow_links_only() -> None:
    found = [cheapest(full(10**8), speed, CPU) for speed in SPEEDS]
    assert [coding for coding, _ in itertools.groupby(found)] == ["zstd", "none"]


def test_denser_changes_are_worth_a_codec_of_all_weights_on_faster_links() -> None:
    def switch(density: float) -> float:
        """The fastest link for which `class` is chosen."""
        found = [s for s in SPEEDS if cheapest(work(density), s, CPU) == "class"]
        return float(max(found))

    assert switch(0.001) < switch(0.01) < switch(0.1)


def test_nothing_costs_nothing() -> None:
    nothing = Work(0, 1000, 0, 0, is_full=False)
    assert cheapest(nothing, 1.0, CPU) == "none"


def test_no_coding_is_expected_to_take_more_than_the_payload() -> None:
    tiny = work(1e-7, 10**9)
    assert all(sent_bytes(coding, tiny, CPU) <= tiny.raw_bytes for coding in CPU.deltas)


def test_a_plan_counts_as_its_sparse_and_dense_bytes_say() -> None:
    found = Work.of(plan(600, 2000), 10_000, 20_000)
    assert (found.changes, found.raw_bytes) == (100 + 750, 2600)
    assert not found.is_full
