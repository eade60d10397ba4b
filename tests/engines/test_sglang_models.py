"""SGLang's own model classes hold, bit for bit, what SGLang's own loader would load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltasync import SenderOptions
from deltasync.integrations.engine_sync import EngineSync
from deltasync.transports import shared_memory
from tests.engines import quantized
from tests.engines import sglang_models as sglang
from tests.engines.checkpoints import (
    Weights,
    changed,
    checkpoint,
    random_weights,
    save,
    write_config,
)
from tests.engines.environment import use_sglang
from tests.engines.reached import Seen, seen
from tests.worlds.ranks import run_ranks

BUCKET_BYTES = 1 << 14  # less than the matrices that DeepSeek's loader pairs
PLAIN = [
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    # Two matrices of the checkpoint are one here, and its loader wants both in one call.
    "DeepseekV3ForCausalLM",
]
# No experts beside latent attention: SGLang's run on CPUs with AMX alone.
_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
DENSE = {"num_key_value_heads": 4, "first_k_dense_replace": 2, "attention_bias": False} | {
    "rope_scaling": _YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
}
CASES = [
    *((architecture, "") for architecture in PLAIN),
    ("Qwen3ForCausalLM", "block FP8"),  # SGLang 0.5.23 loads no such scales into a Llama
    ("LlamaForCausalLM", "channel FP8"),
    ("LlamaForCausalLM", "channel INT8"),
]


def versions(folder: Path, architecture: str, form: str) -> list[dict[str, Tensor]]:
    """What the engine is started on, that of a full sync, and those of deltas."""
    more: dict[str, Any] = DENSE if architecture == "DeepseekV3ForCausalLM" else {}
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    weights = checkpoint(write_config(architecture, plain, more), 0)
    if form:
        more = more | {"quantization_config": quantized.CONFIGS[form]}
    write_config(architecture, folder, more)
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    second = random_weights(specs, 1)
    third = changed(second, 0.3, seed=2)
    every = [random_weights(specs, 0), second, third, third, changed(third, 0.01, seed=3)]
    return [quantized.served(form, one) for one in every] if form else every


def started(folder: Path, form: str) -> Any:
    """A worker's model, of what SGLang runs on GPUs alone as GPUs keep it."""
    if form:
        import sglang.srt.layers.quantization.fp8 as fp8

        torch.cuda.get_device_capability = lambda *_: (9, 0)
        fp8._is_cpu = False
    return sglang.started(folder)


def keep_started(_: int, folder: Path, form: str, file: Path) -> None:
    """In a process of its own: what a worker holds that was just started."""
    save_file(named(seen(started(folder, form))), file)


def named(found: dict[str, Seen]) -> dict[str, Tensor]:
    return {f"{one.dtype} {one.shape} {path}": one.bits for path, one in found.items()}


def moved(before: dict[str, Seen], now: dict[str, Seen]) -> list[str]:
    """A captured graph would read what was there."""
    return [path for path, one in now.items() if one.address != before[path].address]


def follow(_: int, architecture: str, form: str, folder: Path, file: Path) -> None:
    first, *others = versions(folder, architecture, form)
    save(folder, first)
    model = started(folder, form)
    before = seen(model)
    source = Weights({name: tensor.clone() for name, tensor in others[0].items()})
    transport = shared_memory.Sender(folder / "socket")
    options = SenderOptions(bucket_bytes=BUCKET_BYTES)
    with EngineSync(source, sglang.Server(model), transport, options=options) as sync:
        for number, weights in enumerate(others):
            source.take(weights)
            stats = sync.send_weights()
            assert (stats.kind, stats.receivers) == ("delta" if number else "full", 1)
            assert moved(before, seen(model)) == []
    now, cold = named(seen(model)), load_file(file)
    assert now.keys() == cold.keys()
    assert [path for path, bits in now.items() if not torch.equal(bits, cold[path])] == []


@pytest.mark.promise("Bits", "An engine holds what its own loader would load.")
@pytest.mark.timeout(360)
@pytest.mark.parametrize(("architecture", "form"), CASES)
def test_any_history_leaves_what_sglang_would_load(
    architecture: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_sglang(monkeypatch)
    folder, file = tmp_path / "model", tmp_path / "cold.safetensors"
    folder.mkdir()
    save(folder, versions(folder, architecture, form)[-1])
    run_ranks(keep_started, 1, folder, form, file, timeout_s=110)
    run_ranks(follow, 1, architecture, form, folder, file, timeout_s=110)
