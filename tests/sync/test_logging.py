"""What is logged of syncs: a line each, reasons where nobody else hears of them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from deltasync import ModuleSource, ModuleTarget, StagingThread, WeightReceiver, WeightSender
from deltasync.transports import shared_memory
from tests.worlds.links import Stubborn, Watched, bits_equal, fleet, random_model, until

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
        stats = here.sender.send_weights(timeout_s=5)
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
        r"other\[0/1\] wrote v1: full, 152 bytes of patches, \d+\.\d ms",
        r"other\[0/1\] wrote v2: delta, \d+ bytes of patches, \d+\.\d ms",
        r"same\[0/1\] joined at v1: same digest",
        r"same\[0/1\] wrote v2: delta, \d+ bytes of patches, \d+\.\d ms",
    ]
    assert all(map(re.fullmatch, told, heard)), heard
    assert len(caplog.records) == 6


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "cannot commit"])
def test_losses_and_second_tries_are_warned_of(
    is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source, leaves = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with fleet(source, wrap=Watched) as here:
        here.join({"stays": random_model(SHAPES, 0), "leaves": leaves})
        source.get_parameter("a").data += 1
        if is_lost:
            here.link.lose_at("begin", here, "leaves/0")
        else:
            leaves.get_parameter("a").data = leaves.get_parameter("a").data.clone()
        here.sender.send_weights(timeout_s=5)
    *again, lost = lines(caplog, WARNING, "sync.sender")
    if is_lost:
        why = "PeerLost: peer 1: the receiver hung up"
        assert again == [f"sending v2 again, to 1 receivers: leaves[0/1]: {why}"]
    else:
        why = "TargetMoved: storage of 'a' was replaced; rejoin"
        assert not again
    assert lost == f"lost leaves[0/1] in v2: {why}"


def test_what_a_receiver_raises_is_not_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    target = Stubborn(random_model(SHAPES, 1))
    with fleet(random_model(SHAPES, 0)) as here:
        here.join(target)
        target.fails = True
        with pytest.raises(Exception, match="planted"):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(here.serving["engine/0"].errors))
    assert lines(caplog, WARNING) == []


def test_a_staging_thread_warns_of_what_it_keeps_to_itself_and_not_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine rejoins only after it had joined."""
    for name in ("_RETRY_S", "_TURN_S"):
        monkeypatch.setattr(f"deltasync.sync.staging_thread.{name}", 0.02)
    source, target = random_model(SHAPES, 0), random_model(SHAPES, 1)
    link, tries = shared_memory.Receiver(tmp_path / "socket"), list[bytes]()
    connect = link.connect

    def tried(greeting: bytes, *, timeout_s: float) -> None:
        tries.append(greeting)
        connect(greeting, timeout_s=timeout_s)

    monkeypatch.setattr(link, "connect", tried)
    with (
        WeightReceiver(ModuleTarget(target), link) as receiver,
        StagingThread(receiver, pause=nullcontext),
    ):
        until(lambda: len(tries) > 8)  # no trainer is there yet
        (first,) = lines(caplog, WARNING)
        with WeightSender(
            ModuleSource(source), shared_memory.Sender(tmp_path / "socket")
        ) as sender:
            sender.wait_for_receivers(1)
            assert sender.send_weights().receivers == 1
            until(lambda: bits_equal(source, target))
        tries.clear()
        until(lambda: len(tries) > 8)
        receiver.close()
    told = lines(caplog, WARNING)[1:]
    assert first.startswith("engine[0/1] has not joined yet: ")
    assert 1 <= len(told) <= 3  # it was lost, and does not come back
    assert all(one.startswith("engine[0/1] rejoins, after a sync that failed: ") for one in told)


COMMAND = """
import logging, sys, deltasync.sync.sender
assert (logging.getLogger('deltasync').handlers, logging.getLogger().handlers) == ([], [])
from deltasync.cli import main
sys.argv = ['', '--version']
try: main()
finally: logging.getLogger('deltasync.sync.sender').warning('doubled')
"""


def test_the_library_installs_no_handler_and_commands_log_nothing_beside_what_they_say() -> None:
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
