"""vLLM's quantized layers are written in place where it moves them, or refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from deltasync.integrations.trainer_info import WithoutRoutes
from tests.engines import cold, quantized
from tests.engines.checkpoints import checkpoint, write_config
from tests.engines.environment import use_cpu
from tests.engines.judge import EQUAL, REFUSED, Verdict, Versions
from tests.engines.programs import Program
from tests.worlds.ranks import run_ranks

Found = Callable[[str, str, str, str], None]
TRITON = "TritonFp8BlockScaledMMKernel"
# Form, kernel of matrices ("" for the CPU's own), backend of experts, architecture.
Case = tuple[str, str, str, str]
ROUTED: list[Case] = [
    ("block FP8", TRITON, "", "LlamaForCausalLM"),
    ("block FP8", "CutlassFp8BlockScaledMMKernel", "", "LlamaForCausalLM"),
    ("block FP8", TRITON, "TRITON", "Qwen3MoeForCausalLM"),
    ("block FP8, compressed", TRITON, "TRITON", "Qwen3MoeForCausalLM"),
    ("channel FP8", "", "", "LlamaForCausalLM"),  # transposed
    ("channel FP8", "CutlassFP8ScaledMMLinearKernel", "TRITON", "Qwen3MoeForCausalLM"),
    ("channel INT8", "TritonInt8ScaledMMLinearKernel", "", "LlamaForCausalLM"),
    ("MXFP8", "FlashInferCutlassMxfp8LinearKernel", "", "LlamaForCausalLM"),  # scales in tiles
    ("MXFP8", "FlashInferCutedslMxfp8LinearKernel", "", "LlamaForCausalLM"),  # and transposed
    ("MXFP4", "EmulationMxfp4LinearKernel", "", "LlamaForCausalLM"),
    ("INT4", "", "", "LlamaForCausalLM"),  # codes change places, as in all that follow
    ("INT4", "MarlinLinearKernel", "", "LlamaForCausalLM"),
    ("INT4", "MacheteLinearKernel", "", "LlamaForCausalLM"),
    ("INT4", "MarlinLinearKernel", "MARLIN", "Qwen3MoeForCausalLM"),
]
RECOMPUTED: list[Case] = [
    ("NVFP4", "EmulationNvFp4LinearKernel", "", "LlamaForCausalLM"),  # inverse scales, products
    ("NVFP4", "CutlassNvFp4LinearKernel", "", "LlamaForCausalLM"),  # and scales in tiles
    ("NVFP4", "MarlinNvFp4LinearKernel", "", "LlamaForCausalLM"),  # scales of another format
    ("NVFP4", "MarlinNvFp4LinearKernel", "MARLIN", "Qwen3MoeForCausalLM"),
    ("NVFP4, ModelOpt", "EmulationNvFp4LinearKernel", "", "LlamaForCausalLM"),
    ("NVFP4", "EmulationNvFp4LinearKernel", "VLLM_CUTLASS", "Qwen3MoeForCausalLM"),
    ("NVFP4", "EmulationNvFp4LinearKernel", "EMULATION", "Qwen3MoeForCausalLM"),
    ("block FP8", TRITON, "FLASHINFER_CUTLASS", "Qwen3MoeForCausalLM"),  # clamped scales
]
COMPUTED: list[tuple[Case, str]] = [
    (("MXFP8", "EmulationMxfp8LinearKernel", "", "LlamaForCausalLM"), r"\.weight'"),
]


def judge(_rank: int, folder: Path, case: Case, mode: WithoutRoutes) -> None:
    form, kernel, experts, architecture = case
    write_config(architecture, folder)
    specs = {n: (t.dtype, tuple(t.shape)) for n, t in checkpoint(folder, 0).items()}
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["quantization_config"] = quantized.CONFIGS[form]
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with cold.alone():
        quantized.use_kernels([kernel], experts)
        versions = Versions(folder, specs, partial(quantized.served, form))
        verdict = versions.judge(mode)
    (folder / "verdict.json").write_text(json.dumps(verdict.record()), encoding="utf-8")


def judged(folder: Path, case: Case, mode: WithoutRoutes = "refuse") -> Verdict:
    run_ranks(judge, 1, folder, case, mode, timeout_s=280)
    return Verdict(**json.loads((folder / "verdict.json").read_text(encoding="utf-8")))


@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ROUTED + RECOMPUTED, ids=" ".join)
def test_what_is_moved_or_computed_of_scales_after_loading_is_written_in_place(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every sync each tensor is what a fresh engine has, and where it was."""
    use_cpu(monkeypatch, packs=False)
    verdict = judged(tmp_path, case)
    assert verdict.outcome == EQUAL, verdict


@pytest.mark.timeout(300)
def test_mxfp8_that_is_dequantized_in_each_step_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "0")
    verdict = judged(tmp_path, ("MXFP8", "EmulationMxfp8LinearKernel", "", "LlamaForCausalLM"))
    assert verdict.outcome == EQUAL, verdict


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "name"), COMPUTED, ids=lambda one: " ".join(one)[:60])
def test_what_is_computed_after_loading_is_refused_by_name(
    case: Case, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=False)
    verdict = judged(tmp_path, case)
    assert verdict.outcome == REFUSED, verdict
    assert name.strip(r"\.'") in verdict.message


@pytest.mark.timeout(500)
@pytest.mark.parametrize("setup", ["one", "tensor"])
@pytest.mark.parametrize("form", ["channel FP8", "INT4"])
def test_a_whole_engine_follows_and_generates(
    form: str, setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Found
) -> None:
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    command = ("-m", "tests.engines.parallel", tmp_path, "LlamaForCausalLM", setup, "refuse")
    with Program(*command, form) as program:
        assert "followed" in program.wait(timeout_s=480)
    architecture = f"LlamaForCausalLM, {form.removeprefix('channel ')}"
    found("vLLM", architecture, "1" if setup == "one" else "TP 2", "routed")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("setup", ["tensor", "experts"])
@pytest.mark.parametrize(
    ("form", "kernel", "experts"),
    [
        ("block FP8", TRITON, "TRITON"),
        ("channel FP8", "CutlassFP8ScaledMMLinearKernel", "TRITON"),
        ("INT4", "MarlinLinearKernel", "MARLIN"),
        ("NVFP4", "EmulationNvFp4LinearKernel", "EMULATION"),
        ("NVFP4", "MarlinNvFp4LinearKernel", "MARLIN"),
    ],
)
def test_ranks_take_their_parts_of_quantized_experts(
    form: str,
    kernel: str,
    experts: str,
    setup: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints name each expert and its scales; two ranks stack halves of them, or half of them.

    After every sync each rank holds what it holds after a cold start.
    """
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_PLUGINS", f"{os.environ['VLLM_PLUGINS']},kernels_of_gpus")
    monkeypatch.setenv("TESTED_KERNELS", f"{kernel} {experts}")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    command = ("-m", "tests.engines.parallel", tmp_path, "Qwen3MoeForCausalLM", setup, "refuse")
    with Program(*command, form) as program:
        assert "followed" in program.wait(timeout_s=480)
