"""The recipes for accelerate and Lightning: each version is the trainer's weights, bit for bit."""

from __future__ import annotations

import re

import pytest

from tests.engines.environment import ROOT
from tests.engines.programs import Program

VERSIONS = range(1, 6)  # the weights that both begin with, and four steps of eight batches


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "With accelerate and Lightning, engines follow every optimizer step, also where gradients "
    "accumulate. `make test-trl`",
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["accelerate_steps", "lightning_steps"])
def test_a_second_process_holds_what_each_step_leaves(recipe: str) -> None:
    with Program(ROOT / "docs" / "examples" / f"{recipe}.py") as program:
        said = program.wait()
    found = re.findall(r"(trainer|engine) v(\d+) ([0-9a-f]{64})", said)
    engine = {int(version): digest for who, version, digest in found if who == "engine"}
    trainer = {int(version): digest for who, version, digest in found if who == "trainer"}
    assert list(engine) == list(VERSIONS)
    assert len(set(engine.values())) == len(VERSIONS)
    assert trainer == {version: engine[version] for version in VERSIONS[1:]}
