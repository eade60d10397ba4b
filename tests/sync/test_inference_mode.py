"""Calls made within `torch.inference_mode()`, outside of it, and changing: all sync alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltasync import (
    CheckpointTensor,
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
    fold,
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
from deltasync.transports.base import ReceiveTransport, SendTransport
from tests.worlds.links import random_model
from tests.worlds.trainers import Sharded, Trainer

SHAPES = {"a": (40, 16), "b": (16,), "c": (33, 4)}
SCHEDULES = {
    "first-inside": (True, False, False, False),
    "inside": (True, True, True, True),
    "outside": (False, False, False, False),
    "changing": (False, True, True, False),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
made_inside = pytest.mark.parametrize("made", [False, True], ids=["made-outside", "made-inside"])


def mode(is_inside: bool) -> AbstractContextManager[object]:
    return torch.inference_mode() if is_inside else nullcontext()


def model(seed: int, is_inside: bool = False) -> nn.Module:
    with mode(is_inside):
        return random_model(SHAPES, seed)


def change(trainer: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in trainer.parameters():
            parameter.view(-1)[::7].add_(1)


def follows(
    schedule: Sequence[bool],
    source: WeightSource | LocalWeights,
    target: WeightTarget,
    holds: Callable[[], bool],
    step: Callable[[bool], object],
    link: Callable[[], tuple[SendTransport, Callable[[], ReceiveTransport]]],
) -> None:
    """Sync once for each of a schedule, both ends in its mode; the ends are made in the first."""
    with ThreadPoolExecutor(1) as pool:
        with mode(schedule[0]):
            transport, other_end = link()
            sender, receiver = WeightSender(source, transport), WeightReceiver(target, other_end())
        with sender, receiver:
            for is_inside in schedule:
                step(is_inside)

                def receive(is_inside: bool = is_inside) -> int:
                    with mode(is_inside):
                        if receiver.stage(timeout_s=60):
                            receiver.commit()
                        receiver.detach()
                        receiver.attach()
                        receiver.digests()
                        assert torch.is_inference_mode_enabled() == is_inside
                        assert torch.is_grad_enabled() != is_inside
                    return receiver.version or 0

                received = pool.submit(receive)
                with mode(is_inside):
                    sender.wait_for_receivers(1, timeout_s=60)
                    version = sender.send_weights(timeout_s=60).version
                    assert torch.is_inference_mode_enabled() == is_inside
                assert received.result(60) == version
                assert holds()


def in_process() -> tuple[SendTransport, Callable[[], ReceiveTransport]]:
    link = inprocess.Sender()
    return link, link.receiver


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.named_parameters())


@schedules
@made_inside
def test_modules_sync_in_any_mode(schedule: Sequence[bool], made: bool, tmp_path: Path) -> None:
    def shared() -> tuple[SendTransport, Callable[[], ReceiveTransport]]:
        end = shared_memory.Sender(tmp_path / "link")
        return end, partial(shared_memory.Receiver, end.path)

    trainer, engine = model(0, made), model(1, made)
    source, target = ModuleSource(trainer), ModuleTarget(engine)
    for link in (in_process, shared):
        follows(
            schedule,
            source,
            target,
            partial(same, trainer, engine),
            lambda _: change(trainer),
            link,
        )


def as_weights(trainer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((f"{name}.weight", tensor) for name, tensor in trainer.named_parameters())


def quantized(trainer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return served_weights(as_weights(trainer), forms)


def forms(name: str, shape: tuple[int, ...]) -> Fp8 | None:
    return Fp8() if name == "a.weight" else None


@schedules
@made_inside
@pytest.mark.parametrize("kind", ["served", "streamed"])
def test_what_is_quantized_or_streamed_syncs_in_any_mode(
    schedule: Sequence[bool], made: bool, kind: str
) -> None:
    trainer, streamed = model(0, made), StreamedWeights()
    engine = bag({n: torch.zeros_like(t) for n, t in quantized(random_model(SHAPES, 1))})

    def step(is_inside: bool) -> None:
        change(trainer)
        with mode(is_inside):
            for name, _ in quantized(trainer):
                assert torch.is_inference_mode_enabled() == is_inside, name
            streamed.take(quantized(trainer))

    def holds() -> bool:
        served, state = dict(quantized(trainer)), engine.state_dict()
        names = zip(sorted(served), sorted(state), strict=True)
        return all(torch.equal(as_bits(served[n]), as_bits(state[own])) for n, own in names)

    renamed = ModuleSource(trainer, rename=lambda name: f"{name}.weight")
    source = streamed if kind == "streamed" else ServedSource(renamed, forms)
    target = ModuleTarget(engine, rename=lambda name: name.replace("/", "."))
    follows(schedule, source, target, holds, step, in_process)


def bag(tensors: dict[str, Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name.replace(".", "/"), tensor)
    return module


class Engine(nn.Module):
    """All parameters in one, as its loader puts them there."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.zeros(sum(t.numel() for t in model(0).parameters())))
        self.derived = nn.Buffer(torch.zeros(1), persistent=False)

    def places(self) -> dict[str, Tensor]:
        sizes = {name: tensor.numel() for name, tensor in model(0).named_parameters()}
        return dict(zip(sizes, torch.split(self.whole.data, list(sizes.values())), strict=True))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.places()[name].copy_(tensor.reshape(-1))

    def process(self) -> None:
        self.derived.copy_(self.whole.data[:1] * 2)

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.load_weights(weights)
        self.process()


@schedules
@made_inside
@pytest.mark.parametrize("kind", ["routed", "reloaded"])
def test_engines_with_loaders_sync_in_any_mode(
    schedule: Sequence[bool], made: bool, kind: str
) -> None:
    trainer = model(0, made)
    with mode(made):
        engine = Engine()
    tensors = [CheckpointTensor(n, tuple(t.shape), t.dtype) for n, t in trainer.named_parameters()]
    with mode(schedule[0]):
        target: WeightTarget = (
            RoutedTarget(engine, tensors, finish=engine.process)
            if kind == "routed"
            else ReloadedTarget(tensors, engine.reload, module=engine)
        )

    def holds() -> bool:
        here = engine.places()
        is_same = all(torch.equal(t.view(-1), here[n]) for n, t in trainer.named_parameters())
        return is_same and bool(engine.derived[0] == engine.whole[0] * 2)

    follows(schedule, ModuleSource(trainer), target, holds, lambda _: change(trainer), in_process)


@schedules
@made_inside
def test_stores_are_written_and_read_in_any_mode(
    schedule: Sequence[bool], made: bool, tmp_path: Path
) -> None:
    trainer, engine = model(0, made), model(1, made)
    with mode(schedule[0]):
        sender = StoreSender(ModuleSource(trainer), tmp_path)
        receiver = StoreReceiver(ModuleTarget(engine), tmp_path)
    with receiver:
        for is_inside, fetches in zip(schedule, cycle([True, False]), strict=False):
            change(trainer)
            with mode(is_inside):
                version = sender.publish().version
                if fetches:
                    receiver.fetch(timeout_s=60)
                elif receiver.stage(timeout_s=60):
                    receiver.commit()
                receiver.digests()
            assert receiver.version == version
            assert same(trainer, engine)


@schedules
def test_ranks_of_a_trainer_send_in_any_mode(schedule: Sequence[bool]) -> None:
    trainer = random_model(SHAPES, 0)
    whole = {name: ShardSpec.whole(t.shape) for name, t in trainer.named_parameters()}
    first = {n: w for n, w in whole.items() if n != "a"}
    sources = [Sharded(trainer, boxes) for boxes in (first, {"a": whole["a"]})]
    with closing(Trainer(sources)) as here:
        engine = random_model(SHAPES, 1)
        here.add(ModuleTarget(engine))
        for is_inside in schedule:
            change(trainer)
            for source in sources:
                source.step()
            with mode(is_inside):
                here.wait(1)
            here.around = lambda is_inside=is_inside: mode(is_inside)  # type: ignore[misc]
            here.send(timeout_s=60)
            assert same(trainer, engine)


@schedules
def test_exports_work_in_any_mode(schedule: Sequence[bool], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer, link = model(0), inprocess.Sender()
    with WeightSender(ModuleSource(trainer), link) as sender, ThreadPoolExecutor(1) as pool:
        with mode(schedule[0]):
            receiver = WeightReceiver(CopiedTarget(), link.receiver())
        for number, is_inside in enumerate(schedule):
            change(trainer)
            received = pool.submit(receiver.receive_weights, timeout_s=60)
            with mode(is_inside):
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
@made_inside
def test_patches_are_made_and_applied_in_any_mode(schedule: Sequence[bool], made: bool) -> None:
    with mode(made):
        weights = nn.Parameter(torch.randn(100))
        steps = [weights.detach() + number for number in range(1, 4)]
    patches = []
    for is_inside, new, old in zip(schedule, steps, [weights, *steps], strict=False):
        with mode(is_inside):
            patches.append(diff(old, new))
    with mode(schedule[1]):
        merged = fold(patches)
    assert merged is not None
    for is_inside in schedule:
        with mode(is_inside):
            apply_patch(weights, merged)
    assert torch.equal(weights, steps[-1])
