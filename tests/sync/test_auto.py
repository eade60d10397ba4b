"""compression="auto": the coding follows the speed of the link, as given or as it is seen."""

from __future__ import annotations

import math
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync import ModuleSource, SenderOptions, TrainerRank, WeightSender
from deltasync.delta.codecs.choosing import CODING_COSTS, Work, predicted_s
from deltasync.delta.codecs.coding import Coding
from deltasync.errors import ConfigError, TransportError
from deltasync.sync.stats import SyncStats
from deltasync.sync.target.routed import RoutedTarget
from deltasync.transports import inprocess
from deltasync.transports.base import Capabilities, Frame
from tests.sync.harness import Model, Receivers, ThroughSender, bits_equal, fleet, step
from tests.sync.test_coded import model, nudged
from tests.sync.test_parts import CHECKPOINT, rank_of, trainer
from tests.sync.thin_links import Process, thin_links

CPU = CODING_COSTS["cpu"]
NUMEL = 4_000_000


class SlowSender(ThroughSender):
    """A link to another host: payloads are on their way for a time, one after another.

    Attributes:
        bytes_per_s: How fast it is.
        meet_s: How long receivers are elsewhere when a payload is to be sent.
    """

    bytes_per_s = math.inf
    meet_s = 0.0
    _free_at = 0.0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self._inner.capabilities.devices, None)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        if frame.payload is not None:
            self._arrive()
            time.sleep(self.meet_s)
            self._free_at = time.monotonic() + len(frame.payload) / self.bytes_per_s
        super().send(frame, timeout_s=timeout_s)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        self._arrive()
        return super().collect_replies(timeout_s=timeout_s)

    def _arrive(self) -> None:
        time.sleep(max(0.0, self._free_at - time.monotonic()))


class SlowFleet(Receivers):
    """A sender and receivers with a slow link between them."""

    def __init__(self, source: Model, options: SenderOptions, bytes_per_s: float) -> None:
        inner = inprocess.Sender()
        super().__init__([inner])
        self.link = SlowSender(inner)
        self.link.bytes_per_s = bytes_per_s
        self.sender = WeightSender(ModuleSource(source), self.link, options=options)


def work_of(stats: SyncStats) -> Work:
    """What a delta of bfloat16 had to send, all sparse."""
    return Work(stats.nnz, stats.numel, 6 * stats.nnz, 6 * stats.nnz, is_full=False)


def change(source: Model, seed: int, share: float = 0.02) -> None:
    nudged(source.get_parameter("a").data, share, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "speed", [0, 0.0, -1, math.nan, math.inf, -math.inf, "fast", [1], 0j], ids=str
)
def test_speeds_that_are_none_are_refused(speed: Any) -> None:
    with pytest.raises(ConfigError, match="link_gbit_s"):
        SenderOptions(compression="auto", link_gbit_s=speed)


def test_payloads_that_stay_in_memory_are_not_coded() -> None:
    source, target = model(1), model(2)
    with fleet(source, options=SenderOptions(compression="auto")) as here:
        here.add(target)
        here.wait(1)
        for seed in range(3):
            stats = here.sender.send_weights()
            assert (stats.compression, stats.link_gbit_s) == ("none", None)
            assert list(stats.bytes_by_codec) == ["none"]
            assert bits_equal(source, target)
            change(source, seed)


@pytest.mark.parametrize(
    ("gbit_s", "whole", "delta"),
    [(100.0, "none", "none"), (0.1, "zstd", "gap"), (0.001, "zstd", "class")],
)
def test_a_speed_that_is_given_counts_on_every_link(
    gbit_s: float, whole: Coding, delta: Coding
) -> None:
    source, target = model(1), model(2)
    options = SenderOptions(compression="auto", link_gbit_s=gbit_s)
    with fleet(source, options=options) as here:
        here.add(target)
        here.wait(1)
        stats = here.sender.send_weights()
        assert (stats.kind, stats.compression, stats.link_gbit_s) == ("full", whole, gbit_s)
        change(source, 3)
        stats = here.sender.send_weights()
        assert (stats.kind, stats.compression, stats.link_gbit_s) == ("delta", delta, gbit_s)
        assert any(name.startswith(delta) for name in stats.bytes_by_codec)
        assert bits_equal(source, target)


@pytest.mark.parametrize("gbit_s", [100.0, 0.1, 0.0001])
def test_receivers_of_parts_get_what_they_can_decode(gbit_s: float) -> None:
    source, generator = trainer(0), torch.Generator().manual_seed(0)
    ranks = [rank_of(trainer(1), n) for n in range(2)]
    with fleet(source, options=SenderOptions(compression="auto", link_gbit_s=gbit_s)) as here:
        for number, rank in enumerate(ranks):
            here.add(RoutedTarget(rank, CHECKPOINT), rank=number, world=2)
        here.wait(2)
        for _ in range(3):
            stats = here.sender.send_weights()
            assert stats.compression != "class"
            assert all(bits_equal(rank, rank_of(source, rank.rank)) for rank in ranks)
            step(source, generator, 0.2)


@pytest.mark.parametrize("gbit_s", [0.02, 0.2])
def test_the_speed_of_a_link_is_learnt_and_the_coding_is_near_the_best(gbit_s: float) -> None:
    source, target = model(1, NUMEL), model(2, NUMEL)
    made = SlowFleet(source, SenderOptions(compression="auto"), gbit_s * 125e6)
    try:
        made.add(target)
        made.wait(1)
        stats = made.sender.send_weights(timeout_s=60)
        assert (stats.kind, stats.compression) == ("full", "none"), "no speed was known"
        for seed in range(3):
            change(source, seed)
            stats = made.sender.send_weights(timeout_s=60)
            work, speed = work_of(stats), gbit_s * 125e6
            best = min(predicted_s(coding, work, speed, CPU) for coding in CPU.deltas)
            assert predicted_s(stats.compression, work, speed, CPU) <= 1.1 * best
        assert stats.link_gbit_s is not None
        assert stats.link_gbit_s < 1.5 * gbit_s
        assert bits_equal(source, target)
    finally:
        made.close()


@pytest.mark.slow
def test_the_speed_of_a_network_is_learnt(tmp_path: Path) -> None:
    """Over gloo, whose broadcasts end at the root when socket buffers have them."""
    syncs, speed = 4, 2.5e6
    with thin_links("rate 20mbit burst 64kb latency 400ms") as names, ExitStack() as stack:
        words = "10.77.0.1", "29512", str(syncs)

        def start(role: str, namespace: str) -> Process:
            there = "ip", "netns", "exec", namespace, sys.executable, "-m", "tests.sync.thin"
            return stack.enter_context(Process(*there, role, *words, errors=tmp_path / role))

        sender = start("send", names["t"])
        assert sender.hear() == {"listens": True}
        start("receive", names["e"])
        found = [sender.hear() for _ in range(syncs)]
    assert [one["kind"] for one in found] == ["full", *["delta"] * (syncs - 1)]
    assert found[0]["gbit_s"] < 0.03
    for one in found[1:]:
        nnz = one["nnz"]
        work = Work(nnz, one["numel"], 6 * nnz, 6 * nnz, is_full=False)
        best = min(predicted_s(coding, work, speed, CPU) for coding in CPU.deltas)
        assert predicted_s(one["coding"], work, speed, CPU) <= 1.1 * best, found


def test_a_link_that_becomes_slow_is_noticed() -> None:
    source, target = model(1, NUMEL), model(2, NUMEL)
    made = SlowFleet(source, SenderOptions(compression="auto"), math.inf)
    try:
        made.add(target)
        made.wait(1)
        made.sender.send_weights(timeout_s=60)
        made.link.bytes_per_s = 2e6
        for seed in range(6):
            change(source, seed)
            stats = made.sender.send_weights(timeout_s=60)
        assert stats.compression in ("gap", "class")
        assert bits_equal(source, target)
    finally:
        made.close()


def test_receivers_that_are_elsewhere_are_no_slow_link() -> None:
    source, target = model(1), model(2)
    made = SlowFleet(source, SenderOptions(compression="auto"), math.inf)
    try:
        made.add(target)
        made.wait(1)
        made.link.meet_s = 1.0
        for seed in range(3):
            stats = made.sender.send_weights(timeout_s=60)
            change(source, seed)
        assert stats.link_gbit_s is None or stats.link_gbit_s > 0.008  # 0.8 MB in more than 1 s
    finally:
        made.close()


def test_options_that_are_replaced_choose_from_then_on() -> None:
    source, target = model(1), model(1)
    with fleet(source, options=SenderOptions(compression="gap")) as here:
        here.add(target)
        here.wait(1)
        here.sender.send_weights()
        found = []
        for seed, (compression, gbit_s) in enumerate(
            [("gap", None), ("auto", None), ("auto", 0.001), ("auto", 0.1), ("none", 0.1)]
        ):
            here.sender.options = here.sender.options.model_copy(
                update={"compression": compression, "link_gbit_s": gbit_s}
            )
            change(source, seed)
            found.append(here.sender.send_weights().compression)
            assert bits_equal(source, target)
        assert found == ["gap", "none", "class", "gap", "none"]


def test_ranks_of_a_trainer_need_a_speed() -> None:
    options = SenderOptions(compression="auto")
    link = inprocess.Sender()
    with pytest.raises(ConfigError, match="give link_gbit_s"):
        TrainerRank(
            ModuleSource(model(1)), inprocess.Sender(), link.receiver(), rank=1, world=2,
            options=options,
        )  # fmt: skip
