"""The served bytes that change, at toy size."""

from __future__ import annotations

from benchmarks.served import FORMS, lines, measure, sent


def test_served_forms_change_less_than_bfloat16() -> None:
    found = measure("toy", 1e-5)
    assert set(found) == set(FORMS)
    total = {label: sum(map(sent, steps)) for label, steps in found.items()}
    assert 0 < total["INT4, 128"] < total["NVFP4, ModelOpt"] < total["block FP8"]
    assert 4 * total["block FP8"] < total["bfloat16"]
    assert any(line.startswith("INT4, 128") for line in lines(found))
