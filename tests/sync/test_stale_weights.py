"""Which weights a sender takes for stale in real training: not norms that small steps spare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    SenderOptions,
    StoreSender,
    sync_after_step,
)
from deltasync.delta.bits import torch_dtype
from deltasync.quant.served import ServedSource
from deltasync.sync.source.streamed import StreamedWeights
from tests.worlds.links import Fleet, fleet
from tests.worlds.trainers import Rounded, matrices, rows_of, trainer_of

LIMIT = 5


class Policy(nn.Module):
    """A language model in small: an embedding, two blocks with norms, a head."""

    def __init__(self, hidden: int = 64, tokens: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, hidden), nn.Tanh()) for _ in "12"
        )
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, tokens, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        out: Tensor = self.head(self.norm(hidden))
        return out


def reinforce(policy: nn.Module, seed: int) -> None:
    """Gradients of sampled tokens, by advantages with a mean of 0, as GRPO's."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (8, 16), generator=generator)
    chosen = torch.randint(64, (8, 16, 1), generator=generator)
    rewards = torch.randn(8, 1, generator=generator)
    likely = policy(tokens).float().log_softmax(-1).gather(-1, chosen).squeeze(-1)
    (-(rewards - rewards.mean()) * likely).mean().backward()


def warnings_of(here: Fleet, optimizer: torch.optim.Optimizer, policy: nn.Module) -> list[str]:
    """What is warned of in 4 * LIMIT steps, each of which is sent."""
    engine = copy.deepcopy(policy)
    here.add(engine.bfloat16())
    here.wait(1)
    hook = sync_after_step(optimizer, here.sender, on_error="raise", timeout_s=20)
    found: list[str] = []
    for seed in range(4 * LIMIT):
        reinforce(policy, seed)
        optimizer.step()
        optimizer.zero_grad()
        assert hook.last_stats is not None
        found += hook.last_stats.warnings
    return found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True),
    "two rates": lambda parameters: torch.optim.AdamW(
        [{"params": p, "lr": 1e-6 if p.dim() > 1 else 1e-5} for p in parameters]
    ),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}


@pytest.mark.promise(
    "What operators see",
    "Norms and scales that small steps rarely change are not taken for stale.",
)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_reinforcement_learning_at_small_steps_is_not_warned_of(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    policy = Policy().to(dtype)
    with fleet(policy, options=SenderOptions(warn_unchanged_syncs=LIMIT)) as here:
        assert warnings_of(here, make(policy.parameters()), policy) == []


@pytest.mark.promise(
    "What operators see",
    "Norms and scales that small steps rarely change are not taken for stale.",
)
def test_scales_of_quantized_weights_are_not_warned_of() -> None:
    """They follow the largest elements, which small steps do not change."""
    torch.manual_seed(0)
    policy, found = Policy().bfloat16(), list[str]()
    options = SenderOptions(warn_unchanged_syncs=LIMIT)
    source = ServedSource(ModuleSource(policy), matrices)
    engine = nn.Module()
    for one in source.tensors():
        held = torch.empty(one.shape, dtype=torch_dtype(one.dtype))
        *path, leaf = one.name.split(".")
        owner = engine
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, held)
    with fleet(source, options=options) as here:
        here.add(engine)
        here.wait(1)
        optimizer = OPTIMIZERS["fused"](policy.parameters())
        hook = sync_after_step(optimizer, here.sender, on_error="raise", timeout_s=20)
        for seed in range(3 * LIMIT):
            reinforce(policy, seed)
            optimizer.step()
            optimizer.zero_grad()
            assert hook.last_stats is not None
            found += hook.last_stats.warnings
    assert found == []


@pytest.mark.parametrize("stale", ["head.weight", "blocks.0.1.weight", "blocks.1.1.bias"])
def test_a_tensor_that_the_optimizer_lacks_is_named(stale: str) -> None:
    torch.manual_seed(0)
    policy = Policy().bfloat16()
    with torch.no_grad():
        policy.get_parameter(stale).mul_(0.5)
    others = [parameter for name, parameter in policy.named_parameters() if name != stale]
    with fleet(policy, options=SenderOptions(warn_unchanged_syncs=LIMIT)) as here:
        (warning,) = warnings_of(here, OPTIMIZERS["fused"](others), policy)
    assert warning.startswith(f"'{stale}' require grad and have not changed in {LIMIT} deltas: ")


@pytest.mark.parametrize("stale", ["norm.weight", "blocks.0.0.weight", "head.weight"])
def test_a_float32_tensor_that_the_optimizer_lacks_is_named_whatever_its_size(stale: str) -> None:
    torch.manual_seed(0)
    policy = Policy()
    others = [parameter for name, parameter in policy.named_parameters() if name != stale]
    with fleet(policy, options=SenderOptions(warn_unchanged_syncs=LIMIT)) as here:
        (warning,) = warnings_of(here, OPTIMIZERS["adamw"](others), policy)
    assert warning.startswith(f"'{stale}' require grad and have not changed in {LIMIT} deltas: ")


def test_small_gradients_under_sgd_are_not_warned_of_in_float32() -> None:
    """As of query and key projections: their steps show in no bfloat16, and in their masters."""
    torch.manual_seed(0)
    policy = Policy()
    weight: Any = policy.get_parameter("blocks.0.1.weight")
    weight.register_hook(lambda gradient: gradient * 1e-5)
    with fleet(policy, options=SenderOptions(warn_unchanged_syncs=LIMIT)) as here:
        assert warnings_of(here, torch.optim.SGD(policy.parameters(), lr=0.01), policy) == []


def test_a_tensor_that_is_replaced_during_training_is_named() -> None:
    torch.manual_seed(0)
    policy = Policy().bfloat16()
    optimizer = OPTIMIZERS["adamw"](policy.parameters())
    policy.head.weight = nn.Parameter(policy.head.weight.detach().clone())
    with fleet(policy, options=SenderOptions(warn_unchanged_syncs=LIMIT)) as here:
        (warning,) = warnings_of(here, optimizer, policy)
    assert "'head.weight' require grad" in warning


def test_training_that_reaches_nothing_of_what_is_computed_for_engines_is_warned_of_once() -> None:
    """The source does not say what it computes from: nothing can be known before it is sent."""
    torch.manual_seed(0)
    policy, trained = Policy(), Policy()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
    with fleet(Rounded(policy), options=SenderOptions(warn_unchanged_syncs=LIMIT)) as here:
        here.add(copy.deepcopy(policy).half())
        here.wait(1)
        hook = sync_after_step(optimizer, here.sender, on_error="raise", timeout_s=20)
        found: list[str] = []
        for seed in range(3 * LIMIT):
            reinforce(trained, seed)
            optimizer.step()
            assert hook.last_stats is not None
            found += hook.last_stats.warnings
    (warning,) = found
    assert warning.startswith(f"nothing has changed in {LIMIT} deltas: ")


def test_silence_is_warned_of_again_after_a_change() -> None:
    model = nn.Linear(4, 4)
    with fleet(model, options=SenderOptions(warn_unchanged_syncs=2)) as here:
        here.add(nn.Linear(4, 4))
        here.wait(1)
        counts = []
        for step in range(9):
            if step == 5:
                model.bias.data += 1
            counts.append(len(here.sender.send_weights(timeout_s=20).warnings))
    assert counts == [0, 0, 1, 0, 0, 0, 0, 1, 0]


def test_a_store_is_warned_that_nothing_it_gets_changes(tmp_path: Path) -> None:
    options = SenderOptions(warn_unchanged_syncs=3)
    sender = StoreSender(ModuleSource(nn.Linear(4, 4)), tmp_path / "store", options=options)
    told = [sender.publish().warnings for _ in range(6)]
    assert [len(warnings) for warnings in told] == [0, 0, 0, 1, 0, 0]


def test_streams_are_warned_of_as_a_whole() -> None:
    weights = StreamedWeights(SenderOptions(warn_unchanged_syncs=3))
    with fleet(weights) as here:  # type: ignore[arg-type]
        weights.take([("w", torch.ones(8))])
        here.add(nn.ParameterDict({"w": nn.Parameter(torch.zeros(8))}))
        here.wait(1)
        told = []
        for _ in range(5):
            weights.take([("w", torch.ones(8))])
            told.append(len(here.sender.send_weights(timeout_s=20).warnings))
    assert told == [0, 0, 0, 1, 0]


def test_a_trainer_of_several_ranks_is_watched_by_what_rank_0_holds() -> None:
    source = nn.ParameterDict({n: nn.Parameter(torch.randn(8, 32) / 50) for n in ("a", "b")})
    with trainer_of(
        source, rows_of(source, 2), options=SenderOptions(warn_unchanged_syncs=3)
    ) as here:
        for rank in here.sources:
            for tensor in rank.held.values():
                tensor.requires_grad_()
        here.add(copy.deepcopy(source))
        here.wait(1)
        here.send()
        told: list[str] = []
        for _ in range(4):
            with torch.no_grad():
                source["a"] += 1e-3
                for rank in here.sources:
                    rank.step()
            told += here.send().warnings
    assert [warning.partition(" require")[0] for warning in told] == ["'b'"]
