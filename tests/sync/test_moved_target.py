"""Each way in which live storage moves ends a sync before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, WeightTarget
from deltasync.errors import SyncAborted, TargetMoved
from deltasync.transports import inprocess
from tests.worlds.toy_engines import fixed, layers, routed

SIZE = 4
Move = Callable[[Any, int], object]


def data(change: Callable[[Tensor], Tensor]) -> Move:
    """Let the parameter be something else."""
    return lambda model, at: setattr(model[at].weight, "data", change(model[at].weight.data))


def swapped(model: Any, at: int) -> None:
    one, other = (model[n].weight for n in (at, (at + 1) % SIZE))
    one.data, other.data = other.data, one.data


def awake_elsewhere(model: Any, at: int) -> list[Tensor]:
    weight = model[at].weight
    storage, held = weight.untyped_storage(), weight.clone()
    num_bytes, address = storage.nbytes(), weight.data_ptr()
    storage.resize_(0)
    taken = [torch.zeros_like(held) for _ in range(64)]  # one of them is where it was
    storage.resize_(num_bytes)
    weight.copy_(held)
    assert weight.data_ptr() != address
    return taken


MOVES: dict[str, Move] = {
    "another address": data(torch.clone),
    "another parameter": lambda m, at: setattr(m[at], "weight", fixed(m[at].weight.data.clone())),
    "another module": lambda m, at: m.__setitem__(at, copy.deepcopy(m[at])),
    "other strides": data(lambda weight: weight.view(3, 4).t()),
    "fewer elements": data(lambda weight: weight[:2]),
    "another dtype": data(lambda weight: weight.view(torch.float16)),
    "swapped": swapped,
    "removed": lambda m, at: m.__delitem__(at),
    "registered": lambda m, at: m[at].register_buffer("late", torch.zeros(1)),
}
STAYS: dict[str, Move] = {
    "another parameter of the same storage": lambda m, at: setattr(
        m[at], "weight", fixed(m[at].weight.data)
    ),
    "a buffer that is not saved": lambda m, at: setattr(m[at], "cache", torch.ones(3)),
}
ASLEEP: dict[str, Move] = {  # which nothing can be while numpy holds its storage
    "asleep": lambda m, at: m[at].weight.untyped_storage().resize_(0),
    "awake elsewhere": awake_elsewhere,
}


def target_of(kind: str, model: nn.Sequential) -> WeightTarget:
    return ModuleTarget(model) if kind == "module" else routed(model)


def first_sync(sender: WeightSender) -> None:
    sender.wait_for_receivers(1)
    sender.send_weights()


@pytest.mark.parametrize("changed", [0, SIZE - 1], ids=["of a change", "of no change"])
@pytest.mark.parametrize("name", [*MOVES, *STAYS])
@pytest.mark.parametrize("kind", ["module", "routed"])
def test_nothing_is_written_to_storage_that_moved(kind: str, name: str, changed: int) -> None:
    source, replica = layers(SIZE, 0), layers(SIZE, 1)
    link = inprocess.Sender()
    sender = WeightSender(ModuleSource(source), link)
    receiver = WeightReceiver(target_of(kind, replica), link.receiver())
    with ThreadPoolExecutor(1) as trainer, sender, receiver:
        joined = trainer.submit(first_sync, sender)
        assert receiver.stage()
        receiver.commit()
        joined.result(30)
        source[changed].get_parameter("weight").data[0, 0] += 1
        sent = trainer.submit(sender.send_weights)
        assert receiver.stage()
        held = [layer.get_parameter("weight").data for layer in replica]
        before = [one.clone() for one in held]
        (MOVES | STAYS)[name](replica, 0)
        if name in STAYS:
            receiver.commit()
            sent.result(30)
            assert torch.equal(held[changed], source[changed].get_parameter("weight"))
            return
        with pytest.raises(TargetMoved):
            receiver.commit()
        assert all(map(torch.equal, held, before))
        with pytest.raises(SyncAborted, match="TargetMoved"):
            sent.result(30)
        assert not receiver.is_dirty


@pytest.mark.parametrize("name", ASLEEP)
@pytest.mark.parametrize("kind", ["module", "routed"])
def test_sleep_is_noticed_each_time_that_a_target_looks(kind: str, name: str) -> None:
    model = layers(SIZE, 0)
    target = target_of(kind, model)
    target.bind(target.parameters())
    target.check_unmoved()
    kept = ASLEEP[name](model, SIZE - 1)
    for _ in range(2):
        with pytest.raises(TargetMoved):
            target.check_unmoved()
    del kept
