"""Calls within `torch.inference_mode()`, outside of it, and while new tensors go to another device
by default: all sync alike.

On a device without memory, whatever went there by mistake fails; with `cuda` it would be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    RoutedTarget,
    StoreReceiver,
    StoreSender,
    WeightReceiver,
    WeightSender,
    WeightTarget,
    apply_patch,
    diff,
    export_weights,
)
from deltasync.integrations.streamed import StreamedWeights
from deltasync.quant.served import served_weights
from deltasync.store.copied import CopiedTarget
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.transports import shared_memory
from tests.worlds.fleets import Here, engine_of, fleet_of
from tests.worlds.links import random_model
from tests.worlds.toy_engines import specs
from tests.worlds.trainers import matrices, rows_of, trainer_of

SHAPES = {"a": (40, 16), "b": (16,), "c": (33, 4)}
Mode = Literal["inside", "outside", "elsewhere"]


Schedule = tuple[Mode, tuple[Mode, ...]]
"""Where models are made, and in which mode each sync is; the ends are made in the first."""

SCHEDULES: dict[str, Schedule] = {
    "inside": ("inside", ("inside", "outside", "inside")),
    "changing": ("outside", ("outside", "inside", "inside", "outside")),
    "elsewhere": ("outside", ("elsewhere", "elsewhere", "elsewhere")),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def mode(name: Mode) -> AbstractContextManager[object]:
    match name:
        case "inside":
            return torch.inference_mode()
        case "elsewhere":
            return torch.device("meta")
        case _:
            return nullcontext()


def model(seed: int, name: Mode = "outside") -> nn.Module:
    with mode(name):
        return random_model(SHAPES, seed)


def change(trainer: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in trainer.parameters():
            parameter.view(-1)[::7].add_(1)


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.named_parameters())


class World(NamedTuple):
    """Both ends, what a step of the trainer is besides `change`, and whether it was followed."""

    source: WeightSource | LocalWeights
    target: WeightTarget
    step: Callable[[], object]
    holds: Callable[[], bool]


def plain(trainer: nn.Module, engine: nn.Module) -> World:
    return World(ModuleSource(trainer), ModuleTarget(engine), bool, partial(same, trainer, engine))


def quantized(trainer: nn.Module, engine: nn.Module) -> World:
    streamed, target = StreamedWeights(), CopiedTarget()

    def served() -> dict[str, Tensor]:
        weights = ((f"{name}.weight", tensor) for name, tensor in trainer.named_parameters())
        return dict(served_weights(weights, matrices))

    def holds() -> bool:
        held = target.tensors
        return all(torch.equal(t.float(), held[n].float()) for n, t in served().items())

    return World(streamed, target, lambda: streamed.take(served().items()), holds)


def with_loader(trainer: nn.Module, engine: nn.Module) -> World:
    """An engine that derives something of its weights after each load."""
    derived = torch.zeros(16, device="cpu")

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            engine.get_parameter(name).data.copy_(tensor)

    def finish() -> None:
        derived.copy_(engine.get_parameter("b").data * 2)

    tensors = specs({name: tensor.data for name, tensor in trainer.named_parameters()})
    target = RoutedTarget(engine, tensors, load=load, finish=finish)

    def holds() -> bool:
        is_derived = torch.equal(derived, trainer.get_parameter("b").data * 2)
        return same(trainer, engine) and is_derived

    return World(ModuleSource(trainer), target, bool, holds)


KINDS: dict[str, Callable[[nn.Module, nn.Module], World]] = {
    "module": plain,
    "streamed": quantized,
    "routed": with_loader,
}


@schedules
@pytest.mark.parametrize("kind", KINDS)
def test_links_are_used_in_any_mode(kind: str, schedule: Schedule, tmp_path: Path) -> None:
    trainer, engine = model(0, schedule[0]), model(1, schedule[0])
    with ThreadPoolExecutor(1) as pool:
        with mode(schedule[1][0]):
            world = KINDS[kind](trainer, engine)
            link = shared_memory.Sender(tmp_path / "link")
            sender = WeightSender(world.source, link)
            receiver = WeightReceiver(world.target, shared_memory.Receiver(link.path))

        def receive(name: Mode) -> int:
            with mode(name):
                receiver.detach()
                receiver.attach()
                if receiver.stage(timeout_s=60):
                    receiver.commit()
                with receiver.hold():
                    pass
                assert torch.is_inference_mode_enabled() == (name == "inside")
                assert torch.is_grad_enabled() == (name != "inside")
            return receiver.version or 0

        with sender, receiver:
            for name in schedule[1]:
                change(trainer)
                received = pool.submit(receive, name)
                with mode(name):
                    world.step()
                    sender.wait_for_receivers(1, timeout_s=60)
                    version = sender.send_weights(timeout_s=60).version
                    assert torch.is_inference_mode_enabled() == (name == "inside")
                assert received.result(60) == version
                assert world.holds()
                if kind == "streamed":
                    with mode(name):
                        export_weights(receiver, tmp_path / str(version))
                    found = load_file(tmp_path / str(version) / "model.safetensors")
                    assert torch.equal(found["b.weight"], trainer.get_parameter("b"))


@schedules
def test_stores_and_patches_work_in_any_mode(schedule: Schedule, tmp_path: Path) -> None:
    trainer, engine, late = (model(seed, schedule[0]) for seed in (0, 1, 1))
    weights = nn.Parameter(trainer.get_parameter("a").detach().clone())
    before, patches = weights.detach().clone(), []
    with mode(schedule[1][0]):
        sender = StoreSender(ModuleSource(trainer), tmp_path)
        receiver = StoreReceiver(ModuleTarget(engine), tmp_path)
    with receiver:
        for name in schedule[1]:
            change(trainer)
            with mode(name):
                patches.append(diff(before, trainer.get_parameter("a").detach()))
                version = sender.publish().version
                assert receiver.stage(timeout_s=60)
                receiver.commit()
            before = trainer.get_parameter("a").detach().clone()
            assert receiver.version == version
            assert same(trainer, engine)
    with mode(schedule[1][-1]):
        StoreReceiver(ModuleTarget(late), tmp_path).fetch(timeout_s=60)
        for patch in patches:
            assert patch is not None
            apply_patch(weights, patch)
    assert same(trainer, late)
    assert torch.equal(weights, trainer.get_parameter("a"))


@schedules
def test_ranks_of_a_trainer_send_in_any_mode(schedule: Schedule) -> None:
    trainer, engine = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(trainer, rows_of(trainer, 2)) as here:
        here.add(ModuleTarget(engine))
        for name in schedule[1]:
            change(trainer)
            here.step()
            with mode(name):
                here.wait(1)
            here.around = partial(mode, name)
            here.send(timeout_s=60)
            assert same(trainer, engine)


@schedules
@pytest.mark.parametrize("made", [engine_of, partial(fleet_of, count=2)], ids=["engine", "fleet"])
def test_running_engines_follow_in_any_mode(
    made: Callable[[Path], AbstractContextManager[Here]], schedule: Schedule, tmp_path: Path
) -> None:
    with made(tmp_path) as here:
        for name in schedule[1]:
            change(here.source)
            with mode(name):
                here.sync.connect()
                here.send(timeout_s=60)
            here.check()
