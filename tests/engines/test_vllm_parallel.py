"""A whole vLLM of two ranks, which prove that updates reach what they hold, and follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.environment import use_cpu
from tests.engines.programs import Program


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("architecture", "setup", "mode"), [("Qwen3ForCausalLM", "tensor", "refuse")]
)
def test_the_ranks_of_an_engine_follow(
    architecture: str, setup: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    with Program("-m", "tests.engines.parallel", tmp_path, architecture, setup, mode) as program:
        assert "followed" in program.wait(timeout_s=480)
