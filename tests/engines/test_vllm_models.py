"""After any sync, a model of vLLM's holds what vLLM makes of the same weights, or it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deltasync.integrations.trainer_info import WithoutRoutes
from tests.engines import cold, quantized
from tests.engines.checkpoints import checkpoint, write_config
from tests.engines.environment import use_cpu
from tests.engines.judge import EQUAL, REFUSED, Versions
from tests.worlds.ranks import run_ranks

MODES: tuple[WithoutRoutes, ...] = "refuse", "reload"
TRITON = "TritonFp8BlockScaledMMKernel"
CUTLASS = "CutlassFP8ScaledMMLinearKernel"

pytestmark = pytest.mark.timeout(300)


class Case(NamedTuple):
    """A model, what vLLM makes of its weights, and what becomes of it.

    Attributes:
        architecture: Key of `checkpoints.CONFIGS`.
        form: Key of `quantized.CONFIGS`, with a kernel of matrices ("" for the CPU's own) and a
            backend of experts.
        outcomes: By the answer to weights without routes.
        message: Pattern of what is raised at the first outcome.
    """

    architecture: str
    form: str = ""
    kernel: str = ""
    experts: str = ""
    outcomes: tuple[str, ...] = (EQUAL,)
    message: str = ""


def name_of(case: Case) -> str:
    return " ".join(filter(None, case[:4]))


LLAMA, MOE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
# What loaders do with a checkpoint.
PLAIN = [
    Case(LLAMA),
    Case("Qwen3ForCausalLM"),
    Case("Qwen2ForCausalLM"),
    Case("Phi3ForCausalLM"),
    Case(MOE),
    Case("Qwen2MoeForCausalLM"),
    Case("Gemma2ForCausalLM"),
    Case("GPT2LMHeadModel"),
    Case("GptOssForCausalLM"),
    Case("PhiMoEForCausalLM"),
    Case("MiniMaxM2ForCausalLM"),
    Case("Lfm2MoeForCausalLM"),
    Case("Llama4ForCausalLM"),
    Case("HYV3ForCausalLM"),
    Case("MiMoV2FlashForCausalLM"),
    Case("DeepseekV2ForCausalLM", outcomes=(REFUSED, EQUAL)),  # keeps a matrix twice
    Case("MambaForCausalLM", outcomes=(REFUSED, EQUAL), message=r"aten\.exp"),
]
QUANTIZED = [
    Case(LLAMA, "block FP8", TRITON),
    Case(MOE, "block FP8", TRITON, "TRITON"),
    Case(LLAMA, "channel FP8"),  # transposed
    Case(MOE, "channel FP8", CUTLASS, "TRITON"),
    Case(LLAMA, "channel INT8", "TritonInt8ScaledMMLinearKernel"),
    Case(LLAMA, "MXFP8", "FlashInferCutedslMxfp8LinearKernel"),  # scales in tiles, transposed
    Case(LLAMA, "INT4"),  # codes change places, as in all that follow
    Case(LLAMA, "INT4", "MarlinLinearKernel"),
    Case(LLAMA, "INT4", "MacheteLinearKernel"),
    Case(MOE, "INT4", "MarlinLinearKernel", "MARLIN"),
    Case(  # computed when it is loaded
        LLAMA, "MXFP8", "EmulationMxfp8LinearKernel", outcomes=(REFUSED,), message=r"\.weight"
    ),
]
RECOMPUTED = [
    Case(LLAMA, "NVFP4", "EmulationNvFp4LinearKernel"),  # inverse scales, products
    Case(LLAMA, "NVFP4", "CutlassNvFp4LinearKernel"),  # and scales in tiles
    Case(LLAMA, "NVFP4", "MarlinNvFp4LinearKernel"),  # scales of another format
    Case(MOE, "NVFP4", "MarlinNvFp4LinearKernel", "MARLIN"),
    Case(MOE, "NVFP4", "EmulationNvFp4LinearKernel", "VLLM_CUTLASS"),
    Case(MOE, "NVFP4", "EmulationNvFp4LinearKernel", "EMULATION"),
    Case(MOE, "block FP8", TRITON, "FLASHINFER_CUTLASS"),  # clamped scales
]


def judge(_rank: int, case: Case, folder: Path) -> None:
    """All answers to weights without routes, in one process, which takes long to import vLLM."""
    with cold.alone():
        write_config(case.architecture, folder)
        specs = {n: (t.dtype, tuple(t.shape)) for n, t in checkpoint(folder, 0).items()}
        served: Any = dict
        if case.form:
            quantized.use_kernels([case.kernel], case.experts)
            write_config(
                case.architecture, folder, {"quantization_config": quantized.CONFIGS[case.form]}
            )
            served = partial(quantized.served, case.form)
        versions = Versions(folder, specs, served)
        found = [asdict(versions.judge(mode)) for mode in MODES[: len(case.outcomes)]]
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.promise("Bits", "An engine holds what its own loader would load.")
@pytest.mark.promise(
    "Bits",
    "What an engine computes from its weights is updated in each sync, or `connect` refuses.",
)
@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
@pytest.mark.parametrize("case", [*PLAIN, *QUANTIZED, *RECOMPUTED], ids=name_of)
def test_any_history_leaves_what_vllm_would_load(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every sync each tensor is what a fresh engine has, and where it was."""
    use_cpu(monkeypatch, packs=False)
    run_ranks(judge, 1, case, tmp_path, timeout_s=280)
    verdicts = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert tuple(one["outcome"] for one in verdicts) == case.outcomes, verdicts
    assert re.search(case.message, verdicts[0]["message"]), verdicts
