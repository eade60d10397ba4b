"""Which weights a sender takes for stale in real training: not norms that small steps spare."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    SenderOptions,
    StoreSender,
    WeightSource,
    sync_after_step,
)
from deltasync.quant.served import ServedSource
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.sync.target.copied import CopiedTarget
from tests.worlds.links import fleet
from tests.worlds.trainers import matrices, rows_of, trainer_of

LIMIT = 5
OPTIONS = SenderOptions(warn_unchanged_syncs=LIMIT)


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


def warnings_of(
    optimizer: torch.optim.Optimizer, policy: nn.Module, source: WeightSource | None = None
) -> list[str]:
    """What is warned of in 3 * LIMIT steps of a policy, after each of which a source is sent."""
    found: list[str] = []
    options = OPTIONS if source else OPTIONS.model_copy(update={"wire_dtypes": {"*": "bfloat16"}})
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


def policy_of(dtype: torch.dtype = torch.bfloat16) -> Policy:
    torch.manual_seed(0)
    return Policy().to(dtype)


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
    weight: Any = policy.get_parameter("blocks.0.1.weight")
    weight.register_hook(lambda own: own * gradient)
    assert warnings_of(make(policy.parameters()), policy) == []


@pytest.mark.promise(
    "What operators see",
    "Norms and scales that small steps rarely change are not taken for stale.",
)
def test_scales_of_quantized_weights_are_not_warned_of() -> None:
    """They follow the largest elements, which small steps do not change."""
    policy = policy_of()
    source = ServedSource(ModuleSource(policy), matrices)
    assert warnings_of(adamw(policy.parameters()), policy, source) == []


@pytest.mark.parametrize("stale", ["norm.weight", "head.weight"])
def test_a_tensor_that_the_optimizer_lacks_is_named(stale: str) -> None:
    policy = policy_of(torch.float32)
    others = [parameter for name, parameter in policy.named_parameters() if name != stale]
    (warning,) = warnings_of(adamw(others), policy)
    assert warning.startswith(f"'{stale}' require grad and have not changed in {LIMIT} deltas: ")


def test_silence_is_warned_of_again_after_a_change() -> None:
    model, told = nn.Linear(4, 4), list[int]()
    with fleet(model, options=SenderOptions(warn_unchanged_syncs=2)) as here:
        here.add(nn.Linear(4, 4))
        here.wait(1)
        for turn in range(9):
            model.bias.data += turn == 5
            told.append(len(here.sender.send_weights(timeout_s=60).warnings))
    assert told == [0, 0, 1, 0, 0, 0, 0, 1, 0]


def test_stores_and_streams_are_warned_that_nothing_they_get_changes(tmp_path: Path) -> None:
    options = SenderOptions(warn_unchanged_syncs=3)
    sender = StoreSender(ModuleSource(nn.Linear(4, 4)), tmp_path / "store", options=options)
    assert [len(sender.publish().warnings) for _ in range(6)] == [0, 0, 0, 1, 0, 0]
    weights, told = StreamedWeights(options), list[int]()
    with fleet(weights) as here:
        here.add(CopiedTarget())
        here.wait(1)
        for _ in range(5):
            weights.take([("w", torch.ones(8))])
            told.append(len(here.sender.send_weights(timeout_s=60).warnings))
    assert told == [0, 0, 0, 1, 0]


def test_a_trainer_of_several_ranks_is_watched_by_what_rank_0_holds() -> None:
    source = nn.ParameterDict({n: nn.Parameter(torch.randn(8, 32) / 50) for n in ("a", "b")})
    options = SenderOptions(warn_unchanged_syncs=3)
    told: list[str] = []
    with trainer_of(source, rows_of(source, 2), options=options) as here:
        for rank in here.sources:
            for tensor in rank.held.values():
                tensor.requires_grad_()
        here.add(CopiedTarget())
        here.wait(1)
        here.send()
        for _ in range(4):
            with torch.no_grad():
                source["a"] += 1e-3
                here.step()
            told += here.send().warnings
    assert [warning.partition(" require")[0] for warning in told] == ["'b'"]
