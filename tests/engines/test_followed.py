"""Cases of GPUs on a CPU: a whole engine follows a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.environment import use_cpu, use_sglang
from tests.engines.gpu.cases import CASES
from tests.engines.programs import TIMEOUT_S, Program, objects

ROUTED = [
    "LlamaForCausalLM/channel FP8",
    "GptOssForCausalLM/eager",
    "LlamaForCausalLM/sleep",
    "LlamaForCausalLM/drafts of EAGLE",
    "LlamaForCausalLM/drafts of a model",
    "LlamaForCausalLM/SGLang",
    "LlamaForCausalLM/PP 2",
    "LlamaForCausalLM/TP 2, channel FP8",
    "LlamaForCausalLM/TP 2, INT4",
    "Qwen3ForCausalLM/TP 2",
    "Qwen3MoeForCausalLM/TP 2",
    "Qwen3MoeForCausalLM/TP 2, EP 2",
    "Qwen2MoeForCausalLM/TP 2, EP 2",
]
PACKED = [
    "LlamaForCausalLM/eager",
    "Qwen3ForCausalLM/eager",  # whose head is tied, and packed beside
    "Qwen3MoeForCausalLM/eager",
    "LlamaForCausalLM/online FP8",  # by vLLM itself, and the head is packed
    "LlamaForCausalLM/drafts of a model",
]
REFUSED = ["GptOssForCausalLM/eager"]  # packed: its loader would leave something stale
CASES_ON_CPUS = [
    *((name, False, "routed") for name in ROUTED),
    *((name, True, "reloaded") for name in PACKED),
    *((name, True, "refused") for name in REFUSED),
]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Sleeping weights are not touched. Weights that were kept take the next delta.",
)
@pytest.mark.parametrize(("name", "packs", "outcome"), CASES_ON_CPUS)
def test_an_engine_holds_what_it_would_load(
    name: str, packs: bool, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that Python can reach, or a checksum of SGLang's, and tokens."""
    case = CASES[name]
    if packs and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM packs no bf16 matrices on CPUs without AVX512: oneDNN refuses them")
    if case.engine == "sglang":
        use_sglang(monkeypatch)
    else:
        use_cpu(monkeypatch, packs=packs)
    with Program("-m", "tests.engines.gpu.follow", name, tmp_path) as program:
        [found] = objects(program.wait(), '{"name"')
    assert found["outcome"] == outcome, found
    # The rotary table of gpt-oss gets another dtype when it first runs.
    moved = () if packs else found.get("moved", ())
    assert all(path.endswith("rotary_emb.cos_sin_cache") for path in moved), found


@pytest.mark.parametrize("program", ["parallel", "brought"])
def test_an_engine_bears_what_else_befalls_it(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its ranks fails; checkpoint-engine loads it."""
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    with Program("-m", f"tests.engines.{program}", tmp_path) as running:
        running.wait()
