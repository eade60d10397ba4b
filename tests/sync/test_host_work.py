"""The sender's host work in a sync does not grow with parameters that have not changed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, NamedTensor, Policy, SenderOptions, WeightSource
from deltasync.delta.backend import Kernels
from deltasync.sync.protocol.round import SyncPhase
from tests.sync.interpreted import one_kernel_at_a_time
from tests.sync.lines import Lines
from tests.worlds.links import Model, bits_equal, fleet

pytestmark = [pytest.mark.usefixtures(one_kernel_at_a_time.__name__)]

if torch.cuda.is_available():
    pytest.skip("kernels are compiled here", allow_module_level=True)

FEW = 12
MOST_LINES = 5
"""For a hundred parameters."""


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


def model(count: int, *, is_nested: bool = False) -> nn.Module:
    tensors = {f"w{number}": torch.zeros(8, dtype=torch.bfloat16) for number in range(count)}
    if not is_nested:
        return Model(tensors)
    return nn.ModuleDict({name: Model({"weight": one}) for name, one in tensors.items()})


def lines_of_a_delta(module: nn.Module, source: WeightSource, options: SenderOptions) -> int:
    """Of the third delta, like the others of three parameters."""
    replica, lines, phases = copy.deepcopy(module), Lines(), list[SyncPhase]()
    with fleet(source, options=options) as here:
        here.add(replica)
        here.wait(1)
        here.sender._on_phase = phases.append
        for number in range(4):
            for parameter in list(module.parameters())[:3]:
                parameter.data[number] = number + 1
            with lines if number == 3 else nullcontext():
                stats = here.sender.send_weights()
        assert stats.parameters["changed"] == 3
        assert len(phases) == 12  # begun, decided, held
        assert bits_equal(module, replica)
    return lines.count


SOURCES: dict[str, tuple[bool, Callable[[nn.Module], WeightSource], SenderOptions]] = {
    "flat": (False, ModuleSource, SenderOptions()),
    "nested": (True, ModuleSource, SenderOptions()),
    "new entries": (True, Listing, SenderOptions()),
    "something left out": (False, ModuleSource, SenderOptions(leave_out=["other"])),
    "held in part": (False, ModuleSource, SenderOptions(max_inflight_bytes=0)),
    "dense": (False, ModuleSource, SenderOptions(policy=Policy(dense_above=0))),
}


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(("is_nested", "make", "options"), SOURCES.values(), ids=SOURCES.keys())
def test_unchanged_parameters_take_no_lines(
    is_nested: bool,
    make: Callable[[nn.Module], WeightSource],
    options: SenderOptions,
    kernels: Kernels,
) -> None:
    options = options.model_copy(update={"kernels": kernels})
    counts = []
    for number in (FEW, 4 * FEW):
        module = model(number, is_nested=is_nested)
        counts.append(lines_of_a_delta(module, make(module), options))
    assert counts[1] - counts[0] <= (3 * FEW) / 100 * MOST_LINES, counts
