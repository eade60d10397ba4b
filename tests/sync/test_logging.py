"""What is logged of syncs: a line each, reasons where nobody else hears of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from deltasync import ModuleSource, ModuleTarget, StagingThread, WeightReceiver, WeightSender
from deltasync.transports import shared_memory
from tests.worlds.links import Watched, bits_equal, fleet, random_model, until

SHAPES = {"a": (8, 4), "b": (6,)}
INFO, WARNING = logging.INFO, logging.WARNING


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, logger="deltasync"):
        yield


def lines(caplog: pytest.LogCaptureFixture, level: int, name: str = "") -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name.endswith(name)
    ]


def test_a_sync_is_one_line_at_each_end(caplog: pytest.LogCaptureFixture) -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as here:
        here.join({"same": random_model(SHAPES, 0), "other": random_model(SHAPES, 1)})
        source.get_parameter("a").data[0, :3] += 1
        stats = here.sender.send_weights(timeout_s=60)
        until(lambda: len(lines(caplog, INFO, "sync.receiver")) == 4)
    first, second = lines(caplog, INFO, "sync.sender")
    assert re.fullmatch(
        r"sent v1: full, 100.00% of 38 elements, \d+ bytes, 2 receivers \(2 joined, 0 lost\), "
        r"\d+\.\d ms",
        first,
    )
    assert second == f"sent {stats}"
    heard = sorted(lines(caplog, INFO, "sync.receiver"))
    told = [
        r"other\[0/1\] wrote v1: full, 192 bytes of patches, \d+\.\d ms",
        r"other\[0/1\] wrote v2: delta, \d+ bytes of patches, \d+\.\d ms",
        r"same\[0/1\] joined at v1: same digest",
        r"same\[0/1\] wrote v2: delta, \d+ bytes of patches, \d+\.\d ms",
    ]
    assert all(map(re.fullmatch, told, heard)), heard
    assert len(caplog.records) == 6


def test_losses_and_second_tries_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    source = random_model(SHAPES, 0)
    with fleet(source, wrap=Watched) as here:
        here.add(random_model(SHAPES, 0), engine="stays")
        here.wait(1)  # so that the other one is peer 1
        here.join({"leaves": random_model(SHAPES, 1)})
        source.get_parameter("a").data += 1
        here.link.lose_at("begin", here, "leaves/0")
        here.sender.send_weights(timeout_s=60)
    why = "PeerLost: peer 1: the receiver hung up"
    assert lines(caplog, WARNING, "sync.sender") == [
        f"sending v2 again, to 1 receivers: leaves[0/1]: {why}",
        f"lost leaves[0/1] in v2: {why}",
    ]


def test_the_library_installs_no_handler() -> None:
    assert logging.getLogger("deltasync").handlers == []


@pytest.mark.timeout(120)
def test_an_engine_rejoins_only_after_it_had_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, engine, where = random_model(SHAPES, 0), random_model(SHAPES, 1), tmp_path / "socket"
    with (
        WeightReceiver(ModuleTarget(engine), shared_memory.Receiver(where)) as receiver,
        StagingThread(receiver, pause=nullcontext),
    ):
        until(lambda: len(lines(caplog, WARNING, "staging_thread")) == 1)  # nobody is there yet
        with WeightSender(ModuleSource(source), shared_memory.Sender(where)) as sender:
            sender.wait_for_receivers(1)
            sender.send_weights()
            until(lambda: bits_equal(source, engine))
        until(lambda: len(lines(caplog, WARNING, "staging_thread")) > 1)
        receiver.close()
    first, second, *_ = lines(caplog, WARNING, "staging_thread")
    assert first.startswith("engine[0/1] has not joined yet: ")
    assert second.startswith("engine[0/1] rejoins, after a sync that failed: ")
