"""Runs for readers to read: a small model, published again and again, and what each version was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from pydantic import SecretBytes
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, SenderOptions
from deltasync.delta.bits import as_bits
from deltasync.store.anchors import PublishOptions
from deltasync.store.catalogue import Run
from deltasync.store.receiver import StoreReceiver
from deltasync.store.sender import PublishStats, StoreSender
from deltasync.store.verifying import verify_run
from tests.worlds.stores import Place
from tests.worlds.strategies import same_bits

RUN = "run"
State = Mapping[str, Tensor]


def small_model(seed: int = 0) -> nn.Sequential:
    """A model of two dtypes, with a tied weight and a parameter of one element."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(40, 24), nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 40, bias=False)
    ).bfloat16()
    model[3].register_parameter("weight", model[0].get_parameter("weight"))
    model.register_parameter("scale", nn.Parameter(torch.randn(())))
    return model


def odd_model() -> nn.Sequential:
    """The same, with odd ones out: empty, of other dtypes, one larger than a chunk."""
    model = small_model()
    model.register_buffer("large", torch.randn(1 << 19, dtype=torch.bfloat16))
    model.register_buffer("wide", torch.tensor([1.5, float("nan"), -0.0], dtype=torch.float64))
    model.register_buffer("empty", torch.empty(0, 4, dtype=torch.float16))
    model.register_buffer("codes", torch.arange(33, dtype=torch.uint8))
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model.register_buffer("fp8", torch.randn(17).to(torch.float8_e4m3fn))
    return model


def matrix(side: int = 2048) -> nn.Linear:
    """A model of one bf16 parameter, of 8 MB."""
    return nn.Linear(side, side, bias=False, dtype=torch.bfloat16)


def change(model: nn.Module, *, share: float = 0.02) -> None:
    """Change a share of the elements of each parameter, one at least."""
    with torch.no_grad():
        for parameter in model.parameters():
            mask = torch.rand(parameter.shape) < share
            mask.view(-1)[:1] = True
            as_bits(parameter)[mask] ^= 1
        for buffer in model.buffers():
            as_bits(buffer).view(-1)[::1000] ^= 1


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def has(model: nn.Module, state: State) -> bool:
    """Whether the weights are these, bit for bit."""
    found = model.state_dict()
    return all(same_bits(found[name], tensor) for name, tensor in state.items())


def keyed(place: Place, key: bytes | None) -> Place:
    """The same place, of which manifests are signed."""
    return place.having(mac_key=None if key is None else SecretBytes(key))


@dataclass
class Publisher:
    """A trainer that publishes to a store.

    Attributes:
        publishing, options: Of the sender, besides those that are named here.
        states: The weights of each version.
        stats: What was said of each version.
    """

    place: Place
    anchor_every: int = 100
    compression: Any = "zstd"
    model: nn.Module = field(default_factory=small_model)
    run: str | None = RUN
    publishing: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    stats: dict[int, PublishStats] = field(default_factory=dict)
    sending: Callable[..., StoreSender] = StoreSender

    def __post_init__(self) -> None:
        self.start()

    def start(self, source: Any = None) -> None:
        """Begin with a new sender, as a trainer that is started again."""
        options = {"stream_id": self.run, "compression": self.compression} | self.options
        self.sender = self.sending(
            source or ModuleSource(self.model),
            self.place.url,
            options=None if source else SenderOptions.model_validate(options),
            store=self.place.options,
            publishing=PublishOptions(anchor_every=self.anchor_every, **self.publishing),
        )

    def publish(self, count: int = 1, *, step: Callable[[Any], None] = change) -> int:
        """Publish so many versions, each after a step; the first one of a run as it is."""
        for _ in range(count):
            if self.states:
                step(self.model)
            self.put()
        return max(self.states, default=0)

    def put(self, **how: Any) -> PublishStats:
        """Publish the weights as they are."""
        state = state_of(self.model)
        stats = self.sender.publish(**how)
        self.states[stats.version], self.stats[stats.version] = state, stats
        return stats


@dataclass
class Follower:
    """An engine that reads from a store.

    Attributes:
        more: Arguments of the receiver, besides those that are named here.
        holding: What the engine holds at first.
    """

    place: Place
    seed: int = 1
    options: Any = None
    model: nn.Module = None  # type: ignore[assignment]
    more: dict[str, Any] = field(default_factory=dict)
    holding: State | None = None

    def __post_init__(self) -> None:
        self.model = small_model(self.seed) if self.model is None else self.model
        if self.holding is not None:
            self.model.load_state_dict(self.holding)
        self.receiver = StoreReceiver(
            ModuleTarget(self.model),
            self.place.url,
            store=self.place.options,
            options=self.options,
            **self.more,
        )
        self.fetch = partial(self.receiver.fetch, timeout_s=30)
        self.stage = partial(self.receiver.stage, timeout_s=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.receiver.close()

    @property
    def fetched(self) -> int:
        """Bytes that the last version took."""
        return self.receiver.progress.fetched_bytes

    def holds(self, state: State) -> bool:
        """Whether the engine's weights are these, bit for bit, and it may serve."""
        return has(self.model, state) and not self.receiver.is_dirty


def blank(model: nn.Module) -> nn.Module:
    """An engine for the model, with other weights."""
    made = copy.deepcopy(model)
    for tensor in made.state_dict().values():
        as_bits(tensor).zero_()
    return made


def assert_published(trainer: Publisher, place: Place | None = None) -> None:
    """The store is whole, and new readers get each version that is there, bit for bit."""
    place = place or trainer.place
    found = verify_run(place.url, options=place.options)
    assert found.faults == []
    there = Run.open(place.url, place.options).versions()
    assert found.proved == there
    for version in set(there) & set(trainer.states):
        with Follower(place, model=blank(trainer.model)) as reader:
            assert reader.fetch(version) == version
            assert reader.holds(trainer.states[version])
