"""The benchmark of verl's two ends runs, at tiny size; how long it takes is not asserted."""

from __future__ import annotations

from benchmarks.gpu.report import make_markdown
from benchmarks.verl import VerlPlan, run


def test_every_case_is_recorded_and_few_bytes_travel() -> None:
    results = list(run(VerlPlan.choose("tiny")))
    assert [(r.case, r.density) for r in results] == [
        ("verl_over_bare", 1.0),
        ("verl_over_sync", 1.0),
        ("verl_over_bare", 0.01),
        ("verl_over_sync", 0.01),
        ("verl_bytes", 0.01),
    ]
    assert results[0].bytes >= 2 * results[0].numel
    assert results[-1].met
    assert "a tenth of the model" in make_markdown(results)
