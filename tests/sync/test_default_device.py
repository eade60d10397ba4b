"""Calls while new tensors go to another device by default: memory of the host stays on the host.

On a device without memory whatever went there by mistake fails; with `cuda` it would be slow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from deltasync import (
    CheckpointTensor,
    ModuleSource,
    ModuleTarget,
    RoutedTarget,
    StoreReceiver,
    StoreSender,
    WeightReceiver,
    WeightSender,
    WeightTarget,
)
from deltasync.transports import shared_memory
from tests.worlds.links import Serving, bits_equal, random_model

SHAPES = {"a": (400, 16), "b": (16,), "c": (33, 4), "d": (0, 2)}


class Elsewhere(Serving):
    """Receives in a thread with another default device."""

    def _run(self) -> None:
        with torch.device("meta"):
            super()._run()


def changed(trainer: nn.Module, share: int) -> None:
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.view(-1)[::share].add_(1)


def routed(engine: nn.Module) -> WeightTarget:
    def load(weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            engine.get_parameter(name).data.copy_(tensor)

    held = [CheckpointTensor(n, tuple(p.shape), p.dtype) for n, p in engine.named_parameters()]
    return RoutedTarget(engine, held, load=load)  # type: ignore[arg-type]


def check_link(made: Callable[[nn.Module], WeightTarget], folder: Path) -> None:
    trainer, engine = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with torch.device("meta"):
        sender = WeightSender(ModuleSource(trainer), shared_memory.Sender(folder / "link"))
        receiver = WeightReceiver(made(engine), shared_memory.Receiver(folder / "link"))
    serving = Elsewhere(receiver).start()
    with closing(sender):
        sender.wait_for_receivers(1, timeout_s=60)
        for share in (1, 7, 60):
            changed(trainer, share)
            with torch.device("meta"):
                sender.send_weights(timeout_s=60)
            assert bits_equal(engine, trainer)
        serving.stop()
    assert not serving.errors


def test_links_are_used_with_any_default_device(tmp_path: Path) -> None:
    check_link(ModuleTarget, tmp_path)


def test_routes_are_found_and_used_with_any_default_device(tmp_path: Path) -> None:
    check_link(routed, tmp_path)


def test_stores_are_written_and_read_with_any_default_device(tmp_path: Path) -> None:
    trainer, engine = random_model(SHAPES, 0), random_model(SHAPES, 1)
    late = copy.deepcopy(engine)
    with torch.device("meta"):
        sender = StoreSender(ModuleSource(trainer), tmp_path)
        receiver = StoreReceiver(ModuleTarget(engine), tmp_path)
        for share in (1, 7, 60):
            with torch.device("cpu"):
                changed(trainer, share)
            sender.publish()
            receiver.fetch(timeout_s=60)
        StoreReceiver(ModuleTarget(late), tmp_path).fetch(timeout_s=60)
    assert bits_equal(engine, trainer)
    assert bits_equal(late, trainer)
