"""Toys of the sweep are checkpoints as transformers saves them, and fare as released ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines import cold, toys
from tests.engines.environment import use_cpu
from tests.engines.judge import EQUAL, Versions
from tests.worlds.ranks import run_ranks

# With what the trainer has to leave out, as it is told.
ROUTED: dict[str, list[str]] = {
    "HYV3ForCausalLM": [],
    "LagunaForCausalLM": ["model.layers.*.mlp.experts.e_score_correction_bias"],
    "Lfm2MoeForCausalLM": [],
    "Llama4ForCausalLM": [],
    "MiMoV2FlashForCausalLM": [],
    "MiniMaxM2ForCausalLM": [],
    "PhiMoEForCausalLM": [],
}


def judge(_rank: int, architecture: str, folder: Path) -> None:
    with cold.alone():
        toys.write_toy(architecture, folder)
        how, specs = toys.specs_of(architecture, folder)
        verdict = Versions(folder, specs).judge("refuse")
    found = {"how": how, "outcome": verdict.outcome, "left_out": list(verdict.left_out)}
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ROUTED)
def test_what_transformers_saves_is_routed(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=False)
    run_ranks(judge, 1, architecture, tmp_path, timeout_s=580)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    wanted = {"how": "transformers", "outcome": EQUAL, "left_out": ROUTED[architecture]}
    assert found == wanted
