"""What is logged of syncs: a line each, reasons where nobody else hears of them."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest

from deltasync import ModuleSource, ModuleTarget, StagingThread, WeightReceiver, WeightSender
from deltasync.transports import shared_memory
from tests.worlds.links import Watched, bits_equal, fleet, random_model, until

SHAPES = {"a": (8, 4), "b": (6,)}
INFO, WARNING = logging.INFO, logging.WARNING


def lines(caplog: pytest.LogCaptureFixture, level: int, name: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and record.name.endswith(name)
    ]


def test_a_sync_is_one_line_at_each_end_and_losses_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = random_model(SHAPES, 0)
    with caplog.at_level(INFO, logger="deltasync"), fleet(source, wrap=Watched) as here:
        here.add(random_model(SHAPES, 0), engine="stays")
        first = here.join({"leaves": random_model(SHAPES, 1)})
        source.get_parameter("a").data += 1
        here.link.lose_at("begin", here, "leaves/0")
        second = here.sender.send_weights(timeout_s=60)
        until(lambda: len(lines(caplog, INFO, "sync.receiver")) == 3)
    assert lines(caplog, INFO, "sync.sender") == [f"sent {first}", f"sent {second}"]
    heard = [line.partition(":")[0] for line in lines(caplog, INFO, "sync.receiver")]
    assert sorted(heard) == [
        "leaves[0/1] wrote v1",
        "stays[0/1] joined at v1",
        "stays[0/1] wrote v2",
    ]
    for warned in lines(caplog, WARNING, "sync.sender"):  # a second try, and the loss
        assert "leaves[0/1]" in warned
        assert "the receiver hung up" in warned
    assert len(caplog.records) == 7


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
