"""Calls within `torch.inference_mode()`, outside of it, and while new tensors go to another device
by default: all sync alike.

On a device without memory, whatever went there by mistake fails; with `cuda` it would be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReloadedTarget,
    RoutedTarget,
    StoreReceiver,
    StoreSender,
    WeightReceiver,
    WeightSender,
    WeightTarget,
    apply_patch,
    diff,
    export_weights,
    sync_after_step,
)
from deltasync.delta.bits import as_bits
from deltasync.delta.shard import ShardSpec
from deltasync.quant.fp8 import Fp8
from deltasync.quant.served import ServedSource, served_weights
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import LocalWeights
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import inprocess, shared_memory
from tests.engines.checkpoints import Weights
from tests.worlds.links import random_model
from tests.worlds.repacking_engines import Fused, scaled, verified
from tests.worlds.toy_engines import of, specs, state_of
from tests.worlds.trainers import Sharded, Trainer

SHAPES = {"a": (40, 16), "b": (16,), "c": (33, 4)}
Mode = Literal["inside", "outside", "elsewhere"]


class Schedule(NamedTuple):
    """Where models are made, and in which mode each sync is; the ends are made in the first."""

    made: Mode
    syncs: tuple[Mode, ...]


SCHEDULES = {
    "first-inside": Schedule("outside", ("inside", "outside", "outside")),
    "inside": Schedule("inside", ("inside", "inside")),
    "made-inside": Schedule("inside", ("outside", "inside", "outside")),
    "changing": Schedule("outside", ("outside", "inside", "inside", "outside")),
    "elsewhere": Schedule("outside", ("elsewhere", "elsewhere", "elsewhere")),
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


def is_in(name: Mode) -> bool:
    return torch.is_inference_mode_enabled() == (name == "inside")


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
    """Both ends, what a step of the trainer is, and whether the engine has followed it."""

    source: WeightSource | LocalWeights
    target: WeightTarget
    step: Callable[[Mode], object]
    holds: Callable[[], bool]


def modules(schedule: Schedule) -> World:
    trainer, engine = model(0, schedule.made), model(1, schedule.made)
    return World(
        ModuleSource(trainer),
        ModuleTarget(engine),
        lambda _: change(trainer),
        partial(same, trainer, engine),
    )


def forms(name: str, shape: tuple[int, ...]) -> Fp8 | None:
    return Fp8() if name == "a.weight" else None


def quantized(trainer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    weights = ((f"{name}.weight", tensor) for name, tensor in trainer.named_parameters())
    return served_weights(weights, forms)


def of_quantized(kind: str, schedule: Schedule) -> World:
    trainer, streamed, engine = model(0, schedule.made), StreamedWeights(), nn.Module()
    for name, tensor in quantized(random_model(SHAPES, 1)):
        engine.register_buffer(name.replace(".", "/"), torch.zeros_like(tensor))

    def step(name: Mode) -> None:
        change(trainer)
        with mode(name):
            assert all(is_in(name) for _ in quantized(trainer))
            streamed.take(quantized(trainer))

    def holds() -> bool:
        served, state = dict(quantized(trainer)), engine.state_dict()
        names = zip(sorted(served), sorted(state), strict=True)
        return all(torch.equal(as_bits(served[n]), as_bits(state[own])) for n, own in names)

    renamed = ModuleSource(trainer, rename=lambda name: f"{name}.weight")
    source = streamed if kind == "streamed" else ServedSource(renamed, forms)
    target = ModuleTarget(engine, rename=lambda name: name.replace("/", "."))
    return World(source, target, step, holds)


def with_loader(kind: str, schedule: Schedule) -> World:
    """An engine that derives something of its weights after each load."""
    trainer, engine = model(0, schedule.made), model(1, schedule.made)
    with mode(schedule.made):
        derived = torch.zeros(16)
    tensors = specs({name: tensor.data for name, tensor in trainer.named_parameters()})

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            engine.get_parameter(name).data.copy_(tensor)

    def finish() -> None:
        derived.copy_(engine.get_parameter("b").data * 2)

    def reload(weights: Iterable[tuple[str, Tensor]]) -> None:
        load(weights)
        finish()

    with mode(schedule.syncs[0]):
        target: WeightTarget = (
            RoutedTarget(engine, tensors, load=load, finish=finish)
            if kind == "routed"
            else ReloadedTarget(tensors, reload, module=engine)
        )

    def holds() -> bool:
        is_derived = torch.equal(derived, trainer.get_parameter("b").data * 2)
        return same(trainer, engine) and is_derived

    return World(ModuleSource(trainer), target, lambda _: change(trainer), holds)


def recomputed(schedule: Schedule) -> World:
    first = scaled(0)
    source = Weights({name: tensor.clone() for name, tensor in first.items()})
    with mode("inside" if schedule.made == "inside" else "outside"):
        engine = of(Fused).started(first)
        target = verified(engine, first)
    seeds = iter(range(1, 9))

    def holds() -> bool:
        now, wanted = (state_of(one) for one in (engine, of(Fused).started(source.weights)))
        return all(torch.equal(bits, wanted[path][1]) for path, (_, bits) in now.items())

    return World(source, target, lambda _: source.take(scaled(next(seeds))), holds)


KINDS: dict[str, Callable[[Schedule], World]] = {
    "module": modules,
    "shared memory": modules,
    "served": partial(of_quantized, "served"),
    "streamed": partial(of_quantized, "streamed"),
    "routed": partial(with_loader, "routed"),
    "reloaded": partial(with_loader, "reloaded"),
    "recomputed": recomputed,
}


@schedules
@pytest.mark.parametrize("kind", KINDS)
def test_links_are_used_in_any_mode(kind: str, schedule: Schedule, tmp_path: Path) -> None:
    world = KINDS[kind](schedule)
    with ThreadPoolExecutor(1) as pool:
        with mode(schedule.syncs[0]):
            if kind == "shared memory":
                link = shared_memory.Sender(tmp_path / "link")
                sender = WeightSender(world.source, link)
                receiver = WeightReceiver(world.target, shared_memory.Receiver(link.path))
            else:
                inner = inprocess.Sender()
                sender = WeightSender(world.source, inner)
                receiver = WeightReceiver(world.target, inner.receiver())

        def receive(name: Mode) -> int:
            with mode(name):
                if receiver.stage(timeout_s=60):
                    receiver.commit()
                receiver.detach()
                receiver.attach()
                receiver.digests()
                assert is_in(name)
                assert torch.is_grad_enabled() == (name != "inside")
            return receiver.version or 0

        with sender, receiver:
            for name in schedule.syncs:
                world.step(name)
                received = pool.submit(receive, name)
                with mode(name):
                    sender.wait_for_receivers(1, timeout_s=60)
                    version = sender.send_weights(timeout_s=60).version
                    assert is_in(name)
                assert received.result(60) == version
                assert world.holds()


@schedules
def test_stores_are_written_and_read_in_any_mode(schedule: Schedule, tmp_path: Path) -> None:
    trainer, engine, late = (model(seed, schedule.made) for seed in (0, 1, 1))
    with mode(schedule.syncs[0]):
        sender = StoreSender(ModuleSource(trainer), tmp_path)
        receiver = StoreReceiver(ModuleTarget(engine), tmp_path)
    with receiver:
        for name, fetches in zip(schedule.syncs, cycle([True, False]), strict=False):
            change(trainer)
            with mode(name):
                version = sender.publish().version
                if fetches:
                    receiver.fetch(timeout_s=60)
                elif receiver.stage(timeout_s=60):
                    receiver.commit()
                receiver.digests()
            assert receiver.version == version
            assert same(trainer, engine)
    with mode(schedule.syncs[-1]):
        StoreReceiver(ModuleTarget(late), tmp_path).fetch(timeout_s=60)
    assert same(trainer, late)


@schedules
def test_ranks_of_a_trainer_send_in_any_mode(schedule: Schedule) -> None:
    trainer = random_model(SHAPES, 0)
    whole = {name: ShardSpec.whole(t.shape) for name, t in trainer.named_parameters()}
    first = {n: w for n, w in whole.items() if n != "a"}
    sources = [Sharded(trainer, boxes) for boxes in (first, {"a": whole["a"]})]
    with closing(Trainer(sources)) as here:
        engine = random_model(SHAPES, 1)
        here.add(ModuleTarget(engine))
        for name in schedule.syncs:
            change(trainer)
            for source in sources:
                source.step()
            with mode(name):
                here.wait(1)
            here.around = partial(mode, name)
            here.send(timeout_s=60)
            assert same(trainer, engine)


@schedules
def test_exports_work_in_any_mode(schedule: Schedule, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer, link = model(0), inprocess.Sender()
    with WeightSender(ModuleSource(trainer), link) as sender, ThreadPoolExecutor(1) as pool:
        with mode(schedule.syncs[0]):
            receiver = WeightReceiver(CopiedTarget(), link.receiver())
        for number, name in enumerate(schedule.syncs):
            change(trainer)
            received = pool.submit(receiver.receive_weights, timeout_s=60)
            with mode(name):
                sender.wait_for_receivers(1, timeout_s=60)
                sender.send_weights(timeout_s=60)
                received.result(60)
                export_weights(receiver, tmp_path / str(number))
            found = load_file(tmp_path / str(number) / "model.safetensors")
            assert all(torch.equal(found[n], t) for n, t in trainer.named_parameters())


def test_a_hook_goes_on_after_a_first_sync_within_inference_mode() -> None:
    trainer, engine = nn.Linear(8, 4), nn.Linear(8, 4)
    link = inprocess.Sender()
    with ThreadPoolExecutor(1) as pool, WeightSender(ModuleSource(trainer), link) as sender:
        receiver = WeightReceiver(ModuleTarget(engine), link.receiver())
        received = pool.submit(receiver.receive_weights, timeout_s=60)
        with torch.inference_mode():
            sender.wait_for_receivers(1, timeout_s=60)
            sender.send_weights(timeout_s=60)
        received.result(60)
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
        hook = sync_after_step(optimizer, sender, on_error="raise", on_busy="wait")
        for _ in range(3):
            received = pool.submit(receiver.receive_weights, timeout_s=60)
            trainer(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            received.result(60)
            hook.wait()
            assert same(trainer, engine)
        hook.remove()


@schedules
def test_patches_are_made_and_applied_in_any_mode(schedule: Schedule) -> None:
    with mode(schedule.made):
        weights = nn.Parameter(torch.randn(100))
        steps = [weights.detach() + number for number in range(1, 4)]
    patches = []
    for name, new, old in zip(cycle(schedule.syncs), steps, [weights, *steps], strict=False):
        with mode(name):
            patches.append(diff(old, new))
    for name, patch in zip(cycle(schedule.syncs[::-1]), patches, strict=False):
        assert patch is not None
        with mode(name):
            apply_patch(weights, patch)
    assert torch.equal(weights, steps[-1])
