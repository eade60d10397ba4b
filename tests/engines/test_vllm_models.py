"""vLLM's own model classes hold, bit for bit, what vLLM's own loader would load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltasync import (
    CheckpointTensor,
    RoutedTarget,
    SenderOptions,
    SyncStats,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import torch_dtype
from deltasync.errors import ConfigError
from deltasync.integrations.transformers import TransformersSource
from deltasync.sync.source.layout import source_specs
from deltasync.transports import shared_memory
from tests.engines.checkpoints import CONFIGS, Weights, change, checkpoint, write_config
from tests.engines.models import Place, vllm_models
from tests.worlds.links import fleet
from tests.worlds.ranks import free_port, run_ranks

Found = Callable[[str, str, str, str], None]
REFUSED = {"MambaForCausalLM": r"aten\.exp"}
# Into how many tensor and pipeline parallel ranks; whether the former have their own experts.
SETUPS = {"TP 2": (2, 1, False), "TP 2, EP 2": (2, 1, True), "PP 2": (1, 2, False)}


def target_of(model: nn.Module, weights: dict[str, Tensor]) -> RoutedTarget:
    return RoutedTarget(
        model, [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    )


def assert_as_loaded(model: nn.Module, fresh: Any, weights: dict[str, Tensor]) -> None:
    fresh.load_weights(iter(weights.items()))
    held = dict(model.named_parameters())
    for name, parameter in fresh.named_parameters():
        ours, theirs = held[name].view(torch.uint8), parameter.view(torch.uint8)
        assert torch.equal(ours, theirs), name


def follow_twice(_: int, folder: Path) -> None:
    """In one process, which takes long to import vLLM."""
    follow(folder, joins_equal=True)
    follow(folder, joins_equal=False)


def follow(folder: Path, *, joins_equal: bool) -> None:
    weights = checkpoint(folder, 0)
    generator = torch.Generator().manual_seed(1)
    with vllm_models(folder, 2) as (model, fresh):
        model.load_weights(iter(checkpoint(folder, 0 if joins_equal else 1).items()))
        with fleet(Weights(weights), options=SenderOptions(bucket_bytes=1 << 18)) as here:
            here.add(target_of(model, weights))
            here.wait(1)
            assert here.sender.send_weights().full_synced == (0 if joins_equal else 1)
            assert_as_loaded(model, fresh, weights)
            for share in (0.001, 0.0, 0.3, 1.0, 0.01):
                change(weights, share, generator)
                stats = here.sender.send_weights()
                assert (stats.kind, stats.receivers, stats.lost) == ("delta", 1, {})
                assert_as_loaded(model, fresh, weights)


def follow_a_tied_trainer(_: int, folder: Path) -> None:
    """Made by `from_pretrained`, which calls its tied weights by the head's name first."""
    import transformers

    weights = checkpoint(folder, 0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    trainer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    source = TransformersSource(trainer)
    tied = [tensor.names for tensor in source.tensors() if len(tensor.names) > 1]
    assert tied == [("lm_head.weight", "model.embed_tokens.weight")]
    with vllm_models(folder, 2) as (model, fresh), fleet(source) as here:
        specs = source_specs(source.tensors())
        tied_too = [
            CheckpointTensor(s.name, s.shape, torch_dtype(s.dtype), s.names[1:]) for s in specs
        ]
        here.add(RoutedTarget(model, tied_too))
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        assert_as_loaded(model, fresh, weights)
        change(weights, 0.1, torch.Generator().manual_seed(1))
        live = dict(trainer.named_parameters())
        for name, tensor in weights.items():
            live[name].data.copy_(tensor)
        assert here.sender.send_weights().kind == "delta"
        assert_as_loaded(model, fresh, weights)


def follow_in_parts(rank: int, folder: Path, port: int, setup: str) -> None:
    """One of two ranks of an engine; the first is the trainer too."""
    weights = checkpoint(folder, 0)
    generator = torch.Generator().manual_seed(1)
    path = folder / "socket"
    sender = WeightSender(Weights(weights), shared_memory.Sender(path)) if rank == 0 else None
    tensor, pipeline, experts = SETUPS[setup]
    place = Place(rank, tensor, pipeline, port, experts)
    with vllm_models(folder, 2, place) as (model, fresh), ThreadPoolExecutor(1) as trainer:
        model.load_weights(iter(checkpoint(folder, 1).items()))
        link = shared_memory.Receiver(path)
        target = target_of(model, weights)
        if experts:
            assert_has_own_experts(rank, model, target, weights)
        receiver = WeightReceiver(target, link, rank=rank, world=2)
        for number, share in enumerate((0.0, 0.001, 0.3, 1.0, 0.01)):
            change(weights, share, generator)
            sent = trainer.submit(send, sender, 2) if sender is not None else None
            assert receiver.receive_weights(timeout_s=60) == number + 1
            if sent is not None:
                stats = sent.result(60)
                assert (stats.receivers, stats.lost) == (2, {})
                assert stats.kind == ("delta" if number else "full")
            assert_as_loaded(model, fresh, weights)
        receiver.close()
    if sender is not None:
        sender.close()


def assert_has_own_experts(
    rank: int, model: nn.Module, target: RoutedTarget, weights: dict[str, Tensor]
) -> None:
    """Two of four, and whole."""
    names = [spec.name for spec in target.parameters()]
    taken = {int(number) for name in names for number in re.findall(r"\.experts\.(\d+)\.", name)}
    assert taken == {2 * rank, 2 * rank + 1}
    assert 2 * experts_numel(model.named_parameters()) == experts_numel(weights.items())


def experts_numel(tensors: Iterable[tuple[str, Tensor]]) -> int:
    return sum(tensor.numel() for name, tensor in tensors if ".experts." in name)


def send(sender: WeightSender, receivers: int) -> SyncStats:
    sender.wait_for_receivers(receivers, timeout_s=60)
    return sender.send_weights()


def refuse(_: int, architecture: str, folder: Path) -> None:
    weights = checkpoint(folder, 0)
    with vllm_models(folder, 1) as [model]:
        with pytest.raises(ConfigError, match=REFUSED[architecture]):
            target_of(model, weights).parameters()
        assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.promise("Bits", "An engine holds what its own loader would load.")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", sorted(CONFIGS.keys() - REFUSED.keys()))
def test_any_history_leaves_what_vllm_would_load(
    architecture: str, tmp_path: Path, found: Found
) -> None:
    folder = write_config(architecture, tmp_path)
    run_ranks(follow_twice, 1, folder, timeout_s=280)
    found("vLLM", architecture, "1", "routed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_tied_weights_of_from_pretrained(architecture: str, tmp_path: Path) -> None:
    folder = write_config(architecture, tmp_path)
    run_ranks(follow_a_tied_trainer, 1, folder, timeout_s=280)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", REFUSED)
def test_loaders_that_compute_are_refused(architecture: str, tmp_path: Path, found: Found) -> None:
    folder = write_config(architecture, tmp_path)
    run_ranks(refuse, 1, architecture, folder, timeout_s=280)
    found("vLLM", architecture, "1", "refused")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "setup"),
    [
        ("LlamaForCausalLM", "TP 2"),
        ("Phi3ForCausalLM", "TP 2"),
        ("Qwen3MoeForCausalLM", "TP 2"),
        ("DeepseekV2ForCausalLM", "TP 2"),
        ("Qwen3MoeForCausalLM", "TP 2, EP 2"),
        ("DeepseekV2ForCausalLM", "TP 2, EP 2"),  # shared experts are split
        ("LlamaForCausalLM", "PP 2"),
    ],
)
def test_ranks_hold_what_vllm_would_load_there(
    architecture: str,
    setup: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: Found,
) -> None:
    monkeypatch.setenv("VLLM_DIST_IDENT", tmp_path.name)  # as vLLM's own executor does
    folder = write_config(architecture, tmp_path)
    checkpoint(folder, 0)  # written once, before two read it
    run_ranks(follow_in_parts, 2, folder, free_port(), setup, timeout_s=280)
    found("vLLM", architecture, setup, "routed")
