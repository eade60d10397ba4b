"""The Python of a sync does not grow with parameters that have not changed, at either end."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    NamedTensor,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSource,
)
from deltasync.delta.backend import Kernels
from tests.sync.interpreted import one_kernel_at_a_time
from tests.sync.lines import Lines
from tests.worlds.links import bits_equal, fleet
from tests.worlds.toy_engines import layers, routed

__all__ = ["one_kernel_at_a_time"]  # pytest uses it

if torch.cuda.is_available():
    pytest.skip("kernels are compiled here", allow_module_level=True)

FEW = {"torch": (12, 48), "triton": (8, 24)}
"""Numbers of parameters."""


class Unseen:
    """Lets lines run that are not counted: those of a source of a user's own."""

    def __enter__(self) -> None:
        self._trace = sys.gettrace()
        sys.settrace(None)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._trace)


class Listing(WeightSource):
    """A module's tensors, in a list of new entries each time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def tensors(self) -> list[NamedTensor]:
        with Unseen():
            return [NamedTensor((name,), one) for name, one in self._module.named_parameters()]


def model(count: int, *, is_nested: bool) -> nn.Module:
    """Modules of a weight each, or one that has all of them."""
    nested = layers(count, 0)
    if is_nested:
        return nested
    return nn.ParameterList(nested.parameters())


def change(parameters: list[nn.Parameter], turn: int) -> None:
    for parameter in parameters:
        parameter.data[turn, 0] += 1


def lines_of_sending(module: nn.Module, source: WeightSource, options: SenderOptions) -> Lines:
    """Of the third delta, like the others of three parameters."""
    replica, lines = copy.deepcopy(module), Lines()
    with fleet(source, options=options) as here:
        here.join(replica)
        for turn in range(3):
            change(list(module.parameters())[:3], turn)
            with lines if turn == 2 else nullcontext():
                stats = here.sender.send_weights()
        assert stats.parameters["changed"] == 3
        assert bits_equal(module, replica)
    return lines


SOURCES: dict[str, tuple[bool, Callable[[nn.Module], WeightSource], SenderOptions]] = {
    "nested": (True, ModuleSource, SenderOptions()),
    "new entries": (True, Listing, SenderOptions()),
    "held in part": (False, ModuleSource, SenderOptions(max_inflight_bytes=0)),
}
CASES: list[tuple[str, Kernels]] = [
    *((name, "torch") for name in SOURCES),
    ("held in part", "triton"),
]


@pytest.mark.parametrize(("name", "kernels"), CASES, ids=map(" by ".join, CASES))
def test_unchanged_parameters_take_no_lines_of_the_sender(name: str, kernels: Kernels) -> None:
    is_nested, make, options = SOURCES[name]
    options = options.model_copy(update={"kernels": kernels})
    few, many = (
        lines_of_sending(module, make(module), options)
        for module in (model(count, is_nested=is_nested) for count in FEW[kernels])
    )
    assert many.count - few.count <= 1, (many.counts - few.counts).most_common(5)


def lines_of_receiving(count: int, changed: int, kind: str, kernels: Kernels) -> Lines:
    """Of the third of three deltas that change as many parameters."""
    source, replica, lines = layers(count, 0), layers(count, 1), Lines()
    target = ModuleTarget(replica) if kind == "module" else routed(replica)
    options = ReceiverOptions(kernels=kernels)
    with (
        fleet(source, options=SenderOptions(kernels="torch")) as here,
        WeightReceiver(target, here.transport.receiver(), options=options) as receiver,
        ThreadPoolExecutor(1) as engine,
    ):

        def receive() -> None:
            if kind == "module":
                receiver.receive_weights()
            elif receiver.stage():
                receiver.commit()

        def serve() -> None:
            for turn in range(4):
                with lines if turn == 3 else nullcontext():
                    receive()

        served = engine.submit(serve)
        here.wait(1)
        here.sender.send_weights()
        for turn in range(3):
            change(list(source.parameters())[:changed], turn)
            here.sender.send_weights()
        served.result(60)
        assert bits_equal(source, replica)
    return lines


@pytest.mark.parametrize(
    ("kind", "kernels"), [("module", "torch"), ("routed", "torch"), ("routed", "triton")]
)
def test_parameters_take_no_lines_of_the_receiver(kind: str, kernels: Kernels) -> None:
    few, many = FEW[kernels]
    first = lines_of_receiving(few, 3, kind, kernels)
    unchanged = lines_of_receiving(many, 3, kind, kernels)
    assert unchanged.count - first.count <= 5, (unchanged.counts - first.counts).most_common(5)
    if kernels == "triton":  # the host gathers and scatters by storage, of which each has its own
        changed = lines_of_receiving(many, few, kind, kernels)
        assert changed.count - unchanged.count <= 5, (
            changed.counts - unchanged.counts
        ).most_common(5)
