"""SGLang's own model classes hold, bit for bit, what SGLang's own loader would load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import CheckpointTensor, RoutedTarget, SenderOptions
from tests.engines.checkpoints import Weights, change, checkpoint, write_config
from tests.engines.environment import use_sglang
from tests.engines.sglang_models import started
from tests.worlds.links import fleet
from tests.worlds.ranks import run_ranks

ARCHITECTURES = [
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "OPTForCausalLM",
    "DeepseekV3ForCausalLM",  # two projections have to come in one call
]


def assert_as_loaded(model: Any, weights: dict[str, Tensor]) -> None:
    """Loading all changes nothing."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    model.load_weights(list(weights.items()))
    for name, tensor in model.named_parameters():
        assert torch.equal(before[name].view(torch.uint8), tensor.view(torch.uint8)), name


def follow(_: int, folder: Path) -> None:
    weights = checkpoint(folder, 0)
    generator = torch.Generator().manual_seed(1)
    model = started(folder, load_format="dummy")
    model.load_weights(list(checkpoint(folder, 1).items()))
    target = RoutedTarget(
        model, [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    )
    with fleet(Weights(weights), options=SenderOptions(bucket_bytes=1 << 14)) as here:
        here.add(target)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        assert_as_loaded(model, weights)
        for share in (0.001, 0.0, 0.3, 1.0):
            change(weights, share, generator)
            stats = here.sender.send_weights()
            assert (stats.kind, stats.receivers, stats.lost) == ("delta", 1, {})
            assert_as_loaded(model, weights)


@pytest.mark.promise("Bits", "An engine holds what its own loader would load.")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_history_leaves_what_sglang_would_load(
    architecture: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: Callable[[str, str, str, str], None],
) -> None:
    use_sglang(monkeypatch)
    run_ranks(follow, 1, write_config(architecture, tmp_path), timeout_s=180)
    found("SGLang", architecture, "1", "routed")
