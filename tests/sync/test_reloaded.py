"""Engines that are given a whole checkpoint each time, because of what they make of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import CheckpointTensor, ReloadedTarget
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.errors import ConfigError, EngineFailed, LayoutMismatch, SyncAborted
from deltasync.sync.target.base import WeightTarget
from deltasync.testing.target import TargetContract
from tests.worlds.links import Model, fleet, random_model, step

SHAPES = {"a": (40, 16), "b": (16,), "c": (7, 3)}


class Quantised:
    """An engine that keeps int8 and a scale: nothing of it can be read back."""

    def __init__(self) -> None:
        self.weights: dict[str, tuple[Tensor, Tensor]] = {}
        self.fails_once, self.num_loads = False, 0

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            scale = tensor.abs().max() / 127
            self.weights[name] = (tensor / scale).round().to(torch.int8), scale
            if self.fails_once:
                self.fails_once = False
                raise EngineFailed("planted")
        self.num_loads += 1


def target_of(engine: Quantised, model: Model) -> ReloadedTarget:
    weights = dict(model.named_parameters())
    return ReloadedTarget(
        [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()], engine.load
    )


def assert_as_loaded(engine: Quantised, model: Model) -> None:
    fresh = Quantised()
    fresh.load((name, tensor.data) for name, tensor in model.named_parameters())
    for name, (values, scale) in fresh.weights.items():
        assert torch.equal(engine.weights[name][0], values), name
        assert torch.equal(engine.weights[name][1], scale), name


def test_the_engine_holds_what_it_makes_of_the_trainers_weights() -> None:
    source, engine = random_model(SHAPES, 0), Quantised()
    generator = torch.Generator().manual_seed(0)
    with fleet(source) as here:
        here.add(target_of(engine, source))
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        assert_as_loaded(engine, source)
        for share in (0.01, 0.3, 1.0):
            step(source, generator, share)
            assert here.sender.send_weights().kind == "delta"
            assert_as_loaded(engine, source)


def test_what_it_was_loaded_with_is_not_sent_again() -> None:
    source, engine = random_model(SHAPES, 0), Quantised()
    target = target_of(engine, source)
    target.set_loaded_weights((name, tensor.data) for name, tensor in source.named_parameters())
    with fleet(source) as here:
        here.add(target)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        assert engine.num_loads == 0


def test_an_engine_that_fails_to_load_is_given_the_old_version_again() -> None:
    source, engine = random_model(SHAPES, 0), Quantised()
    with fleet(source) as here:
        serving = here.add(target_of(engine, source))
        here.wait(1)
        here.sender.send_weights()
        old = deepcopy(source)
        step(source, torch.Generator().manual_seed(0), 0.5)
        engine.fails_once = True
        with pytest.raises(SyncAborted):
            here.sender.send_weights()
        assert_as_loaded(engine, old)
        assert not serving.receiver.is_dirty
        here.wait(1)
        here.sender.send_weights()
        assert_as_loaded(engine, source)


class Packing(nn.Module):
    """Keeps what it is given the other way round; whether it does so every time is to be seen."""

    def __init__(self, weights: Mapping[str, Tensor], *, always: bool) -> None:
        super().__init__()
        self.always, self.times = always, 0
        for name, tensor in weights.items():
            self.register_buffer(name, torch.zeros_like(tensor))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            packs = self.always or self.times == 0
            self.get_buffer(name).copy_(tensor.flip(0) if packs else tensor)
        self.times += 1


@pytest.mark.parametrize("always", [True, False])
def test_reloading_is_proved_by_what_it_leaves_as_it_was(always: bool) -> None:
    weights = {name: tensor.data for name, tensor in random_model(SHAPES, 0).named_parameters()}
    engine = Packing(weights, always=always)
    engine.load(weights.items())
    before = {name: tensor.clone() for name, tensor in engine.named_buffers()}
    target = ReloadedTarget(
        [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in weights.items()], engine.load
    )
    target.set_loaded_weights(weights.items())

    def make() -> nn.Module:
        return Packing(weights, always=always)

    def load(model: Any, given: Iterable[tuple[str, Tensor]]) -> None:
        model.load(given)

    with nullcontext() if always else pytest.raises(ConfigError, match="'a'"):
        target.verify_reload(Proof(engine, Startup(make, load=load)))
    for name, tensor in engine.named_buffers():
        assert torch.equal(tensor, before[name])


def test_what_the_engine_held_before_the_first_sync_cannot_be_put_back() -> None:
    source, engine = random_model(SHAPES, 0), Quantised()
    with fleet(source) as here:
        serving = here.add(target_of(engine, source))
        here.wait(1)
        engine.fails_once = True
        with pytest.raises(SyncAborted):
            here.sender.send_weights()
        assert (serving.receiver.is_dirty, engine.num_loads) == (True, 0)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        assert not serving.receiver.is_dirty
        assert_as_loaded(engine, source)


def test_what_is_known_must_be_as_the_trainer_has_it() -> None:
    """In another dtype that is rounded to, it is: see `test_masters_are_sent_as_was_loaded`."""
    target = target_of(Quantised(), random_model(SHAPES, 0))
    for odd in (torch.zeros(40, 15), torch.zeros(40, 16, dtype=torch.float16)):
        with pytest.raises(LayoutMismatch, match="a: torch"):
            target.set_loaded_weights([("other", torch.zeros(1)), ("a", odd)])


def test_masters_are_sent_as_was_loaded() -> None:
    """Float32 at the trainer, where the engine's checkpoint has bfloat16."""
    source, engine = random_model(SHAPES, 0).float(), Quantised()
    rounded = deepcopy(source).bfloat16()
    target = target_of(engine, source)
    target.set_loaded_weights((name, tensor.data) for name, tensor in rounded.named_parameters())
    with fleet(source) as here:
        here.add(target)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        step(source, torch.Generator().manual_seed(0), 0.3)
        assert here.sender.send_weights().kind == "delta"
        assert_as_loaded(engine, deepcopy(source).bfloat16())


class TestReloadedTarget(TargetContract):
    def make_target(self, state: dict[str, Tensor]) -> WeightTarget:
        target = ReloadedTarget(
            [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in state.items()],
            lambda weights: None,
        )
        target.set_loaded_weights(state.items())
        return target
