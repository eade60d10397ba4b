"""Runs for readers to read: a small model, published again and again, and what each version was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, ReceiverOptions, SenderOptions
from deltasync.store.anchors import PublishOptions
from deltasync.store.receiver import StoreReceiver
from deltasync.store.sender import StoreSender
from tests.worlds.stores import Place
from tests.worlds.strategies import same_bits

RUN = "run"


def small_model(seed: int = 0) -> nn.Sequential:
    """A model of two dtypes, with a tied weight and a parameter of one element."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(40, 24), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 40, bias=False)
    ).bfloat16()
    model[3].register_parameter("weight", model[0].get_parameter("weight"))
    model.register_parameter("scale", nn.Parameter(torch.randn(())))
    return model


def change(model: nn.Sequential, *, share: float = 0.02) -> None:
    """Change a share of the elements, or one."""
    with torch.no_grad():
        for parameter in model.parameters():
            mask = torch.rand(parameter.shape) < share
            parameter[mask] = torch.randn(parameter.shape).to(parameter)[mask]
        model[1].get_parameter("bias")[0] += 1


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@dataclass
class Publisher:
    """A trainer that publishes to a store.

    Attributes:
        states: The weights of each version.
    """

    place: Place
    anchor_every: int = 100
    compression: Any = "zstd"
    model: nn.Sequential = field(default_factory=small_model)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sender = StoreSender(
            ModuleSource(self.model),
            self.place.url,
            options=SenderOptions(stream_id=RUN, compression=self.compression),
            store=self.place.options,
            publishing=PublishOptions(anchor_every=self.anchor_every),
        )

    def publish(self, count: int = 1, *, step: Callable[[nn.Sequential], None] = change) -> int:
        """Publish so many versions, each after a step; the first one of a run as it is."""
        for _ in range(count):
            if self.states:
                step(self.model)
            version = self.sender.publish().version
            self.states[version] = state_of(self.model)
        return max(self.states)


@dataclass
class Follower:
    """An engine that reads from a store."""

    place: Place
    seed: int = 1
    options: ReceiverOptions = field(default_factory=ReceiverOptions)

    def __post_init__(self) -> None:
        self.model = small_model(self.seed)
        self.receiver = StoreReceiver(
            ModuleTarget(self.model),
            self.place.url,
            run=RUN,
            store=self.place.options,
            options=self.options,
        )

    def holds(self, state: dict[str, Tensor]) -> bool:
        """Whether the engine's weights are these, bit for bit."""
        found = self.model.state_dict()
        return all(same_bits(found[name], tensor) for name, tensor in state.items())
