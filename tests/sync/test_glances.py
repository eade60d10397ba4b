"""Sources that are glanced at: what moves reaches receivers, whoever has looked before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, SenderOptions
from deltasync.delta import device
from deltasync.delta.choice import Kernels
from deltasync.errors import SourceChanged
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import Model, bits_equal, fleet, random_model

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
SHAPES = {"a": (8, 6), "b": (40,)}


def move(module: nn.Module) -> None:
    """Put every tensor elsewhere, with other values."""
    for weights in module.parameters():
        weights.data = weights.data + 1


@pytest.mark.parametrize(("kernels", "leave_out"), [("torch", ("none.*",)), ("triton", ())])
def test_a_source_that_others_look_at_too(kernels: Kernels, leave_out: tuple[str, ...]) -> None:
    trainer, replicas = random_model(SHAPES, 0), [random_model(SHAPES, n) for n in (1, 2)]
    source = ModuleSource(trainer)
    options = SenderOptions(kernels=kernels, leave_out=leave_out)
    with fleet(source, options=options) as one, fleet(source, options=options) as other:
        for each, replica in zip((one, other), replicas, strict=True):
            each.join(replica)
        for _ in range(2):
            move(trainer)
            for each, replica in zip((one, other), replicas, strict=True):
                assert each.sender.send_weights().nnz == 88
                assert bits_equal(trainer, replica)
            move(trainer)
            source.tensors()
            for each, replica in zip((one, other), replicas, strict=True):
                each.sender.send_weights()
                assert bits_equal(trainer, replica)


def out_of_memory(plan: Tensor) -> Tensor:
    raise torch.OutOfMemoryError


def replaced(module: Model, name: str) -> None:
    module.register_parameter(name, nn.Parameter(module.get_parameter(name).detach() + 1))


def exchanged(module: Model, name: str) -> None:
    one, other = module.get_parameter(name), module.get_parameter("w0")
    one.data, other.data = other.data, one.data


MOVED: list[Callable[[Model, str], object]] = [
    lambda m, name: setattr(m.get_parameter(name), "data", m.get_parameter(name).data + 1),
    replaced,
    exchanged,
]


@pytest.mark.parametrize("move_one", MOVED, ids=["data", "replaced", "exchanged"])
def test_small_parameters_that_move_once_they_are_read_together(
    move_one: Callable[[Model, str], object],
) -> None:
    trainer, replica = (random_model({f"w{n}": (3, 7) for n in range(30)}, s) for s in (0, 1))
    replica.bfloat16()
    with fleet(trainer, options=SenderOptions(kernels="torch")) as here:
        here.join(replica)
        for turn in range(12):
            if turn % 4 == 3:  # after three syncs from the same places
                move_one(trainer, f"w{1 + turn}")
            trainer.get_parameter(f"w{29 - turn}").data[turn % 3] += 1
            here.sender.send_weights()
            held = {n: p.detach().bfloat16() for n, p in trainer.named_parameters()}
            assert bits_equal(Model(held), replica)
            assert here.sender.send_weights().nnz == 0


def test_a_look_that_was_broken_off_vouches_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with fleet(ModuleSource(trainer), options=SenderOptions(kernels="triton")) as here:
        here.join(replica)
        with monkeypatch.context() as memory:
            memory.setattr(device, "summed", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                here.sender.send_weights()
        move(trainer)
        here.sender.refresh_source()
        here.sender.send_weights(on_source_read=lambda: None)
        assert bits_equal(trainer, replica)


def test_an_earlier_look_vouches_for_nothing_once_a_later_one_has_failed() -> None:
    trainer, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with fleet(ModuleSource(trainer), options=SenderOptions(kernels="torch")) as here:
        here.join(replica)
        here.sender.refresh_source()
        trainer.register_parameter("new", nn.Parameter(torch.zeros(3)))
        move(trainer)
        with pytest.raises(SourceChanged):
            here.sender.refresh_source()
        with pytest.raises(SourceChanged):
            here.sender.send_weights(on_source_read=lambda: None)
