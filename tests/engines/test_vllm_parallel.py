"""A whole vLLM, mostly of two ranks, which prove that updates reach what they hold, and follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.environment import use_cpu
from tests.engines.programs import Program

LLAMA, MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("architecture", "setup", "form"),
    [
        (LLAMA, "one", ""),
        (MOE, "one", ""),  # whose experts are in tiles
        ("Qwen3ForCausalLM", "tensor", ""),
        (MOE, "tensor", ""),
        (MOE, "experts", ""),
        ("Qwen2MoeForCausalLM", "experts", ""),  # shared experts are split
        (LLAMA, "pipeline", ""),
        (LLAMA, "tensor", "channel FP8"),
        (LLAMA, "tensor", "INT4"),
    ],
)
def test_the_ranks_of_an_engine_follow(
    architecture: str,
    setup: str,
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After every sync each rank holds what it holds after a cold start."""
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    command = ("-m", "tests.engines.parallel", tmp_path, architecture, setup)
    with Program(*command, *filter(None, [form])) as program:
        assert "followed" in program.wait(timeout_s=480)
