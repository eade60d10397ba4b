"""What a log says of an engine that was started before its trainer."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest

from deltasync import ModuleSource, ModuleTarget, StagingThread, WeightReceiver, WeightSender
from deltasync.transports import shared_memory
from tests.worlds.links import bits_equal, random_model, until

SHAPES = {"w": (8, 4)}


def test_an_engine_rejoins_only_after_it_had_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = random_model(SHAPES, 0), random_model(SHAPES, 1)
    where = tmp_path / "socket"
    with (
        WeightReceiver(ModuleTarget(target), shared_memory.Receiver(where)) as receiver,
        StagingThread(receiver, pause=nullcontext),
    ):
        until(lambda: len(said(caplog)) == 1)  # no trainer is there yet
        for _ in range(2):
            with WeightSender(ModuleSource(source), shared_memory.Sender(where)) as sender:
                sender.wait_for_receivers(1)
                assert sender.send_weights().receivers == 1
                until(lambda: bits_equal(source, target))
            until(lambda: bool(said(caplog)[1:]))
        receiver.close()
    first, second, *_ = said(caplog)
    assert first.startswith("engine[0/1] has not joined yet: ")
    assert second.startswith("engine[0/1] rejoins, after a sync that failed: ")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.levelno == logging.WARNING]
