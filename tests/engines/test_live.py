"""The benchmark of running engines, at toy size: no request fails, and an update is one call."""

from __future__ import annotations

import pytest

from tests.engines.environment import use_cpu
from tests.engines.programs import Program, objects

# Calls into the engine of an update in several, by the kind of engine.
_SEVERAL = {"LLM": 9, "AsyncLLM": 11, "vllm serve": 10}


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An update of a running vLLM takes one call where that is safe.",
)
@pytest.mark.timeout(900)
def test_updates_of_running_engines_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch, packs=False)
    with Program("-m", "benchmarks", "engines", "--tiny", "--json") as program:
        text = program.wait(timeout_s=880)  # four engines start
    records = objects(text, '{"case"')
    assert [record["case"] for record in records].count("live_reload") == len(_SEVERAL) + 1
    syncs = [record for record in records if record["case"] != "live_reload"]
    assert len(syncs) == 2 * (len(_SEVERAL) + 1)  # an AsyncLLM is quantized, too
    for record in syncs:
        kind, parts = record["model"].split(", ")[1], record["parts"]
        assert parts["calls"] == 1, record
        assert parts["several_calls"] == _SEVERAL[kind], record
        assert (parts.get("tokens_per_s", 0) > 0) is (kind != "LLM")
