"""Which weights a sender takes for stale in real training: not norms that small steps spare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import (
    ModuleSource,
    SenderOptions,
    StoreSender,
    WeightSource,
    sync_after_step,
)
from deltasync.quant.served import ServedSource
from deltasync.store.copied import CopiedTarget
from deltasync.sync import stats
from tests.worlds.links import fleet
from tests.worlds.trainers import matrices

LIMIT = 5


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_LIMIT", LIMIT)


def policy_of(dtype: torch.dtype) -> nn.Module:
    """A language model in small: an embedding, a block, norms, a head."""
    torch.manual_seed(0)
    embed, block, head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
    for layer in (embed, block, head):
        nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(block.bias)
    made = nn.Sequential(embed, nn.RMSNorm(64), block, nn.Tanh(), nn.LayerNorm(64), head)
    return made.to(dtype)


def reinforce(policy: nn.Module, seed: int) -> None:
    """Gradients of sampled tokens, by advantages with a mean of 0, as GRPO's."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (8, 16), generator=generator)
    chosen = torch.randint(64, (8, 16, 1), generator=generator)
    rewards = torch.randn(8, 1, generator=generator)
    likely = policy(tokens).float().log_softmax(-1).gather(-1, chosen).squeeze(-1)
    (-(rewards - rewards.mean()) * likely).mean().backward()


def warnings_of(
    optimizer: torch.optim.Optimizer, policy: nn.Module, source: WeightSource | None = None
) -> list[str]:
    """What is warned of in 3 * LIMIT steps of a policy, after each of which a source is sent."""
    found: list[str] = []
    options = SenderOptions(wire_dtypes={} if source else {"*": "bfloat16"})
    with fleet(source or policy, options=options) as here:
        here.add(CopiedTarget())
        here.wait(1)
        hook = sync_after_step(optimizer, here.sender, on_error="raise", timeout_s=20)
        for seed in range(3 * LIMIT):
            reinforce(policy, seed)
            optimizer.step()
            optimizer.zero_grad()
            assert hook.last_stats is not None
            found += hook.last_stats.warnings
    return found


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-6)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


@pytest.mark.promise(
    "What operators see",
    "Norms and scales that small steps rarely change are not taken for stale.",
)
@pytest.mark.parametrize(
    ("dtype", "make", "gradient"),
    [
        (torch.bfloat16, adamw, 1.0),
        (torch.float32, adamw, 1.0),
        (torch.bfloat16, sgd, 1.0),
        # As of query and key projections: steps that show in their masters, and in no bfloat16.
        (torch.float32, sgd, 1e-4),
    ],
)
def test_reinforcement_learning_at_small_steps_is_not_warned_of(
    dtype: torch.dtype, make: Optimizer, gradient: float
) -> None:
    policy = policy_of(dtype)
    weight: Any = policy.get_parameter("2.weight")
    weight.register_hook(lambda own: own * gradient)
    assert warnings_of(make(policy.parameters()), policy) == []


@pytest.mark.promise(
    "What operators see",
    "Norms and scales that small steps rarely change are not taken for stale.",
)
def test_scales_of_quantized_weights_are_not_warned_of() -> None:
    """They follow the largest elements, which small steps do not change."""
    policy = policy_of(torch.bfloat16)
    source = ServedSource(ModuleSource(policy), matrices)
    assert warnings_of(adamw(policy.parameters()), policy, source) == []


def test_silence_is_warned_of_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever sends: to engines, or to a store."""
    monkeypatch.setattr(stats, "_LIMIT", 2)
    model, told = nn.Linear(4, 4), list[list[int]]()
    sender = StoreSender(ModuleSource(model), tmp_path)
    with fleet(model) as here:
        here.add(nn.Linear(4, 4))
        here.wait(1)
        for turn in range(9):
            model.bias.data += turn == 5
            both = here.sender.send_weights(timeout_s=60), sender.publish()
            told.append([len(one.warnings) for one in both])
    assert told == [[n, n] for n in (0, 0, 1, 0, 0, 0, 0, 1, 0)]
