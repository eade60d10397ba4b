"""A whole vLLM, mostly of two ranks, which prove that updates reach what they hold, and follow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.environment import use_cpu
from tests.engines.programs import Program

LLAMA, MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
# Form, kernel of matrices, backend of experts. Checkpoints name each expert and its scales; two
# ranks stack halves of them, or half of them.
EXPERTS = [
    ("block FP8", "TritonFp8BlockScaledMMKernel TRITON"),
    ("channel FP8", "CutlassFP8ScaledMMLinearKernel TRITON"),
    ("INT4", "MarlinLinearKernel MARLIN"),
    ("NVFP4", "MarlinNvFp4LinearKernel MARLIN"),
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("architecture", "setup", "form", "kernels"),
    [
        (LLAMA, "one", "", ""),
        (MOE, "one", "", ""),  # whose experts are in tiles
        ("Qwen3ForCausalLM", "tensor", "", ""),
        (MOE, "tensor", "", ""),
        (MOE, "experts", "", ""),
        ("Qwen2MoeForCausalLM", "experts", "", ""),  # shared experts are split
        (LLAMA, "pipeline", "", ""),
        *((LLAMA, "tensor", form, "") for form in ("channel FP8", "INT4")),
        *((MOE, how, *quantized) for how in ("tensor", "experts") for quantized in EXPERTS),
    ],
)
def test_the_ranks_of_an_engine_follow(
    architecture: str,
    setup: str,
    form: str,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After every sync each rank holds what it holds after a cold start."""
    use_cpu(monkeypatch, packs=False)
    if kernels:
        monkeypatch.setenv("VLLM_PLUGINS", f"{os.environ['VLLM_PLUGINS']},kernels_of_gpus")
        monkeypatch.setenv("TESTED_KERNELS", kernels)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    command = ("-m", "tests.engines.parallel", tmp_path, architecture, setup)
    with Program(*command, *filter(None, [form])) as program:
        assert "followed" in program.wait(timeout_s=480)
