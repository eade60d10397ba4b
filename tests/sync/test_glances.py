"""Sources that are glanced at: what moves reaches receivers, whoever has looked before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, SenderOptions
from deltasync.delta.backend import Kernels
from deltasync.errors import ConfigError, SourceChanged
from tests.sync.interpreted import one_kernel_at_a_time
from tests.worlds.links import Model, bits_equal, fleet, random_model

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
SHAPES = {"a": (8, 6), "b": (40,)}


def move(module: nn.Module) -> None:
    """Put every tensor elsewhere, with other values."""
    for weights in module.parameters():
        weights.data = weights.data + 1


@pytest.mark.parametrize(
    ("kernels", "leave_out"), [("torch", ()), ("torch", ("none.*",)), ("triton", ())]
)
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


SPOILT: dict[str, Callable[[Model, nn.Parameter], object]] = {
    "replaced": lambda m, _: m.register_parameter("a", nn.Parameter(torch.zeros(3))),
    "shape": lambda _, a: setattr(a, "data", a.data.reshape(6, 8).clone()),
    "dtype": lambda _, a: setattr(a, "data", a.data.to(torch.int32)),
    "dtype of the same memory": lambda _, a: setattr(a, "data", a.data.view(torch.int32)),
    "beginning of the same memory": lambda _, a: setattr(a, "data", a.data[:4]),
    "added": lambda m, _: m.register_buffer("c", torch.ones(3)),
    "tied": lambda m, a: m.register_parameter("c", a),
}


@pytest.mark.promise("Errors", "`SourceChanged`: members keep what they hold.")
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_another_model_is_refused_each_time(
    spoil: Callable[[Model, nn.Parameter], object],
) -> None:
    trainer, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with fleet(trainer, options=SenderOptions(kernels="torch")) as here:
        here.join(replica)
        held = trainer.get_parameter("a")
        kept = held.data
        spoil(trainer, held)
        for _ in range(3):
            with pytest.raises((SourceChanged, ConfigError)):
                here.sender.send_weights()
        if hasattr(trainer, "c"):
            del trainer.c
        trainer.register_parameter("a", held)
        held.data = kept + 1
        stats = here.sender.send_weights()
        assert (stats.kind, stats.joined, stats.nnz) == ("delta", 0, 48)
        assert bits_equal(trainer, replica)


def replaced(module: Model, name: str) -> None:
    module.register_parameter(name, nn.Parameter(module.get_parameter(name).detach() + 1))


def exchanged(module: Model, name: str) -> None:
    one, other = module.get_parameter(name), module.get_parameter("w0")
    one.data, other.data = other.data, one.data


swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

MOVED: list[Callable[[Model, str], object]] = [
    lambda m, name: setattr(m.get_parameter(name), "data", m.get_parameter(name).data + 1),
    replaced,
    exchanged,
    lambda m, name: swap(m.get_parameter(name), m.get_parameter("w0")),
]


@pytest.mark.parametrize("move_one", MOVED, ids=["data", "replaced", "exchanged", "swapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_parameters_that_move_once_they_are_read_together(
    move_one: Callable[[Model, str], object], dtype: torch.dtype
) -> None:
    trainer, replica = (random_model({f"w{n}": (3, 7) for n in range(30)}, s) for s in (0, 1))
    trainer.to(dtype)
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
