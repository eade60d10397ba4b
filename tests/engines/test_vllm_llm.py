"""A whole vLLM within a program follows a trainer, and is compared with a cold one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.environment import use_cpu
from tests.engines.programs import TIMEOUT_S, Program

LLAMA, MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
PLAIN = [
    ("parallel", "Qwen3ForCausalLM", "tensor"),
    ("parallel", MOE, "tensor"),
    ("parallel", MOE, "experts"),
    ("parallel", "Qwen2MoeForCausalLM", "experts"),  # shared experts are split
    ("parallel", LLAMA, "pipeline"),
    ("parallel", LLAMA, "tensor", "channel FP8"),
    ("parallel", LLAMA, "tensor", "INT4"),
    ("speculative", "eagle", "refuse"),
    ("sleeping",),
    ("brought",),
]
PACKED = [
    ("reloading", LLAMA),
    ("reloading", "Qwen3ForCausalLM"),  # whose head is tied, and packed beside
    ("reloading", MOE),
    ("reloading", LLAMA, "fp8_per_channel"),  # by vLLM itself, and the head is packed
    ("speculative", "of_its_own", "reload"),
]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Sleeping weights are not touched. Weights that were kept take the next delta.",
)
@pytest.mark.parametrize("command", [*PLAIN, *PACKED], ids=" ".join)
def test_an_engine_holds_what_a_cold_one_does(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM's workers are told to sleep, and keep their memory."""
    packs = command in PACKED
    if packs and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM packs no bf16 matrices on CPUs without AVX512: oneDNN refuses them")
    use_cpu(monkeypatch, packs=packs)
    follow(tmp_path, monkeypatch, *command)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM releases no memory of CPUs")
def test_an_engine_that_releases_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(tmp_path, monkeypatch, "sleeping")


def follow(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    with Program("-m", f"tests.engines.{program}", folder, *arguments) as running:
        running.wait()
