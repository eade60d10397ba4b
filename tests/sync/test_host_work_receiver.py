"""A receiver's Python grows neither with what a sync leaves unchanged nor with what it changes."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import deltasync
from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSender,
    WeightTarget,
)
from deltasync.delta.backend import Kernels
from deltasync.transports import inprocess
from tests.worlds.links import bits_equal
from tests.worlds.toy_engines import layers, routed

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here"),
]

PACKAGE = f"{Path(deltasync.__file__).parent}/"
KERNELS = f"{PACKAGE}delta/kernels/"
FEW, MANY = 60, 360  # parameters


class Lines:
    """Lines of the package, without kernels, that one thread runs through."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()

    def __enter__(self) -> Lines:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        is_counted = path.startswith(PACKAGE) and not path.startswith(KERNELS)
        return self._line if is_counted else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.counts[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno] += 1
        return self._line


def delta_of(
    target: WeightTarget, source: nn.Sequential, changed: int, *, stages: bool, kernels: Kernels
) -> Lines:
    """What a receiver runs through in the third of three deltas that change as many weights."""
    lines = Lines()
    link = inprocess.Sender()
    sender = WeightSender(ModuleSource(source), link, options=SenderOptions(kernels="torch"))
    options = ReceiverOptions(kernels=kernels)
    receiver = WeightReceiver(target, link.receiver(), options=options)

    def receive() -> None:
        if not stages:
            receiver.receive_weights()
        elif receiver.stage():
            receiver.commit()

    def serve() -> None:
        for _ in range(3):
            receive()
        with lines:
            receive()

    with ThreadPoolExecutor(1) as engine, sender, receiver:
        served = engine.submit(serve)
        sender.wait_for_receivers(1, timeout_s=10)
        sender.send_weights()
        for step in range(3):
            for layer in list(source)[:changed]:
                layer.get_parameter("weight").data[step, 0] += 1
            sender.send_weights()
        served.result(10)
    return lines


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(("kind", "stages"), [("module", False), ("routed", True)])
def test_parameters_cost_no_python(kind: str, stages: bool, kernels: Kernels) -> None:
    counts: list[Counter[tuple[str, int]]] = []
    for number, changed in ((FEW, 3), (MANY, 3), (MANY, FEW)):
        source, replica = layers(number, 0), layers(number, 1)
        target = ModuleTarget(replica) if kind == "module" else routed(replica)
        counts.append(delta_of(target, source, changed, stages=stages, kernels=kernels).counts)
        assert bits_equal(source, replica)
    few, unchanged, changed_too = counts
    per_100 = 100 * (unchanged.total() - few.total()) / (MANY - FEW)
    assert per_100 <= 10, (per_100, (unchanged - few).most_common(5))
    if kernels == "torch":  # the host gathers and scatters by storage, of which each has its own
        return
    per_100 = 100 * (changed_too.total() - unchanged.total()) / (FEW - 3)
    assert per_100 <= 10, (per_100, (changed_too - unchanged).most_common(5))
