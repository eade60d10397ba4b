"""The model of costs: what is fitted explains the records, and counts what it says it counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale import clusters, fanout, fit, report
from benchmarks.scale.fit import Measured
from benchmarks.scale.model import Costs, Work, features

COSTS = Costs(
    "made up",
    {
        "diff": (1e-4, 1e-12, 1e-13, 8e-7, 1e-3),
        "transfer": (2e-3, 5e-11, 9e-12, 5e-7, 3e-3),
        "commit": (3e-4, 2e-4, 3e-11, 1e-11),
        "rest": (2e-4, 9e-7, 8e-4),
    },
)
WORK = Work(numel=8e9, parameters=400, changed=8e7, trainers=2, engine=2)


@given(
    numel=st.floats(1e8, 1e11),
    density=st.floats(0, 1),
    parameters=st.integers(1, 100_000),
    ranks=st.integers(1, 64),
)
def test_costs_that_made_the_records_are_found_again(
    numel: float, density: float, parameters: int, ranks: int
) -> None:
    rng = np.random.default_rng(0)
    works = [
        Work(
            numel=float(rng.uniform(1e9, 1e11)),
            parameters=float(rng.uniform(100, 20_000)),
            changed=float(rng.uniform(1e5, 1e8)),
            is_dense=bool(n % 3 == 0),
            trainers=1 + n % 4,
            engine=1 + n % 2,
        )
        for n in range(60)
    ]
    found = [Measured("", "", work, COSTS.parts(work), COSTS.pause(work)) for work in works]
    fitted = fit.fit("made up", found)
    asked = Work(
        numel=numel,
        parameters=parameters,
        changed=density * numel,
        trainers=ranks,
        engine=ranks,
    )
    assert fitted.sync(asked) == pytest.approx(COSTS.sync(asked), rel=1e-6)
    assert fitted.pause(asked) == pytest.approx(COSTS.pause(asked), rel=1e-6)


def test_no_cost_is_negative() -> None:
    for link in fit.FILES:
        costs = fit.fit(link, fit.measured(link))
        assert all(one >= 0 for part in costs.seconds.values() for one in part)
        assert {part: len(counts) for part, counts in features(WORK).items()} == {
            part: len(seconds) for part, seconds in costs.seconds.items()
        }


def test_what_is_too_large_to_stage_pauses_the_engine_while_it_arrives() -> None:
    small, large = replace(WORK, changed=1e6), replace(WORK, changed=2e9)
    assert not small.is_in_place
    assert large.is_in_place
    assert COSTS.pause(small) == COSTS.part("commit", small)
    assert COSTS.pause(large) > COSTS.part("transfer", large)


def test_sectors_are_at_most_the_changes_and_at_most_the_memory() -> None:
    few, many = replace(WORK, changed=1e3, engine=1), replace(WORK, changed=8e9, engine=1)
    assert few.sectors == pytest.approx(1e3, rel=1e-3)
    assert many.sectors == pytest.approx(8e9 / 16)


def test_a_cluster_without_room_has_no_prediction() -> None:
    largest = clusters.MODELS[-1]
    assert clusters.predict(COSTS, 0.0, largest, largest.trainers) is None
    found = clusters.predict(COSTS, 1e-3, largest, largest.trainers + 2 * largest.engine)
    assert found is not None
    assert found.engines == 2
    assert found.parts["receivers"] == pytest.approx(2 * largest.engine * 1e-3)


def test_each_receiver_costs_the_trainer_something() -> None:
    assert fanout.measure((1, 12)).each_s > 0


def test_the_page_has_what_the_records_say() -> None:
    """docs/scale.md was written from the records that are there."""
    kept = fanout.FanOut.from_json(fanout.RECORD.read_text(encoding="utf-8"))
    page = report.PAGE.read_text(encoding="utf-8")
    for name, text in report.sections(kept).items():
        assert text in page, name
