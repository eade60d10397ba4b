"""Each way in which live storage moves ends a sync before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, WeightTarget
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import SyncAborted, TargetMoved
from deltasync.transports import inprocess
from tests.sync.layers import layers, routed

SIZE = 4
Move = Callable[[nn.Sequential, int], object]


def another_address(model: nn.Sequential, at: int) -> None:
    weight = model[at].get_parameter("weight")
    weight.data = weight.data.clone()


def another_parameter(model: nn.Sequential, at: int) -> None:
    weight = model[at].get_parameter("weight")
    model[at].weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def another_module(model: nn.Sequential, at: int) -> None:
    model[at] = copy.deepcopy(model[at])


def other_strides(model: nn.Sequential, at: int) -> None:
    weight = model[at].get_parameter("weight")
    weight.data = weight.data.view(3, 4).t()


def another_shape(model: nn.Sequential, at: int) -> None:
    weight = model[at].get_parameter("weight")
    weight.data = weight.data.view(2, 6)


def fewer_elements(model: nn.Sequential, at: int) -> None:
    weight = model[at].get_parameter("weight")
    weight.data = weight.data[:2]


def another_dtype(model: nn.Sequential, at: int) -> None:
    weight = model[at].get_parameter("weight")
    weight.data = weight.data.view(torch.float16)


def asleep(model: nn.Sequential, at: int) -> None:
    model[at].get_parameter("weight").untyped_storage().resize_(0)


def awake_elsewhere(model: nn.Sequential, at: int) -> list[torch.Tensor]:
    weight = model[at].get_parameter("weight")
    storage, held = weight.untyped_storage(), weight.clone()
    num_bytes, address = storage.nbytes(), weight.data_ptr()
    storage.resize_(0)
    taken = [torch.zeros_like(held) for _ in range(64)]  # one of them is where it was
    storage.resize_(num_bytes)
    weight.copy_(held)
    assert weight.data_ptr() != address
    return taken


def swapped(model: nn.Sequential, at: int) -> None:
    one, other = (model[n].get_parameter("weight") for n in (at, (at + 1) % SIZE))
    one.data, other.data = other.data, one.data


def removed(model: nn.Sequential, at: int) -> None:
    del model[at]


def registered(model: nn.Sequential, at: int) -> None:
    model[at].register_buffer("late", torch.zeros(1))


MOVES: list[Move] = [
    another_address,
    another_parameter,
    another_module,
    other_strides,
    another_shape,
    fewer_elements,
    another_dtype,
    asleep,
    awake_elsewhere,
    swapped,
    removed,
    registered,
]


def target_of(kind: str, model: nn.Sequential) -> WeightTarget:
    return ModuleTarget(model) if kind == "module" else routed(model)


@pytest.mark.parametrize("at", [0, SIZE - 1])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("kind", ["module", "routed"])
def test_target_notices(kind: str, move: Move, at: int) -> None:
    model = layers(SIZE, 0)
    target = target_of(kind, model)
    target.bind(target.parameters())
    target.check_unmoved()
    kept = move(model, at)
    for _ in range(2):
        with pytest.raises(TargetMoved):
            target.check_unmoved()
    del kept


def first_sync(sender: WeightSender) -> None:
    sender.wait_for_receivers(1)
    sender.send_weights()


@pytest.mark.parametrize("changed", [0, SIZE - 1], ids=["of a change", "of no change"])
@pytest.mark.parametrize(
    "move",
    [move for move in MOVES if move not in (asleep, awake_elsewhere)],  # numpy holds storage here
    ids=lambda move: move.__name__,
)
@pytest.mark.parametrize("kind", ["module", "routed"])
def test_nothing_is_written_to_storage_that_moved(kind: str, move: Move, changed: int) -> None:
    source, replica = layers(SIZE, 0), layers(SIZE, 1)
    link = inprocess.Sender()
    sender = WeightSender(ModuleSource(source), link)
    receiver = WeightReceiver(target_of(kind, replica), link.receiver())
    with ThreadPoolExecutor(1) as trainer, sender, receiver:
        joined = trainer.submit(first_sync, sender)
        assert receiver.stage()
        receiver.commit()
        joined.result(10)
        source[changed].get_parameter("weight").data[0, 0] += 1
        sent = trainer.submit(sender.send_weights)
        assert receiver.stage()
        before = [layer.get_parameter("weight") for layer in replica]
        held = [one.data for one in before], [one.detach().clone() for one in before]
        move(replica, 0)
        with pytest.raises(TargetMoved):
            receiver.commit()
        assert all(map(torch.equal, *held))
        with pytest.raises(SyncAborted, match="TargetMoved"):
            sent.result(10)
        assert not receiver.is_dirty


@pytest.mark.parametrize("kind", ["module", "routed"])
def test_another_parameter_over_the_same_storage_has_not_moved(kind: str) -> None:
    model = layers(SIZE, 0)
    target = target_of(kind, model)
    target.bind(target.parameters())
    weight = model[1].get_parameter("weight")
    model[1].weight = nn.Parameter(weight.data, requires_grad=False)
    for _ in range(2):
        target.check_unmoved()


def test_what_follows_a_sync_may_not_move_weights() -> None:
    model = layers(SIZE, 0)
    plain = routed(model)
    target = RoutedTarget(
        model, plain._checkpoint, load=plain._load, finish=lambda: another_address(model, 1)
    )
    target.bind(target.parameters())
    with pytest.raises(TargetMoved):
        target.finish({0})
