"""What is logged of syncs: a line each, reasons where nobody else hears of them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deltasync import StagingThread
from tests.sync.test_innocent import Fleet as Watching
from tests.worlds.engines import engine, replace_storage
from tests.worlds.links import Receivers, Stubborn, fleet, random_model, until

SHAPES = {"a": (8, 4), "b": (6,)}


@pytest.fixture(autouse=True)
def _everything(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, logger="deltasync"):
        yield


def lines(caplog: pytest.LogCaptureFixture, name: str, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelno) == (f"deltasync.{name}", level)
    ]


def joined(here: Receivers, *engines: str) -> None:
    for number, name in enumerate(engines):
        here.add(random_model(SHAPES, number), engine=name)
    here.wait(len(engines))
    here.sender.send_weights(timeout_s=5)


def test_a_sync_is_one_line_at_each_end(caplog: pytest.LogCaptureFixture) -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as here:
        joined(here, "same", "other")
        source.get_parameter("a").data[0, :3] += 1
        stats = here.sender.send_weights(timeout_s=5)
        until(lambda: len(lines(caplog, "sync.receiver", logging.INFO)) == 4)
    first, second = lines(caplog, "sync.sender", logging.INFO)
    assert re.fullmatch(
        r"sent v1: full, 100.00% of 38 elements, \d+ bytes, 2 receivers \(2 joined, 0 lost\), "
        r"\d+\.\d ms",
        first,
    )
    assert second == f"sent {stats}"
    assert re.fullmatch(
        rf"sent v2: delta, 7.89% of 38 elements, {stats.payload_bytes} bytes, "
        r"2 receivers \(0 joined, 0 lost\), \d+\.\d ms",
        second,
    )
    heard = sorted(lines(caplog, "sync.receiver", logging.INFO))
    told = [
        r"other\[0/1\] wrote v1: full, 152 bytes of patches, \d+\.\d ms",
        r"other\[0/1\] wrote v2: delta, \d+ bytes of patches, \d+\.\d ms",
        r"same\[0/1\] joined at v1: same digest",
        r"same\[0/1\] wrote v2: delta, \d+ bytes of patches, \d+\.\d ms",
    ]
    assert all(map(re.fullmatch, told, heard)), heard
    assert len(caplog.records) == 6


def test_a_lost_receiver_and_the_second_try_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    source = random_model(SHAPES, 0)
    here = Watching(source)
    try:
        joined(here, "stays", "leaves")
        source.get_parameter("a").data += 1
        here.link.lose_at("begin", here, "leaves/0")
        here.sender.send_weights(timeout_s=5)
    finally:
        here.close()
    why = r"leaves\[0/1\]: PeerLost: peer 1: the receiver hung up"
    again, lost = lines(caplog, "sync.sender", logging.WARNING)
    assert re.fullmatch(rf"sending v2 again, to 1 receivers: {why}", again)
    assert re.fullmatch("lost " + why.replace(": P", " in v2: P", 1), lost)


def test_a_receiver_that_cannot_commit_costs_no_second_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = random_model(SHAPES, 0)
    with fleet(source) as here:
        joined(here, "stays", "leaves")
        replace_storage(here.serving["leaves/0"].receiver._weights.target._module)  # type: ignore[attr-defined]
        source.get_parameter("a").data += 1
        stats = here.sender.send_weights(timeout_s=5)
    why = r"leaves\[0/1\]: TargetMoved: storage of 'a' was replaced; rejoin"
    (lost,) = lines(caplog, "sync.sender", logging.WARNING)
    assert re.fullmatch("lost " + why.replace(": T", " in v2: T", 1), lost)
    assert list(stats.lost) == ["leaves[0/1]"]


def test_what_a_receiver_raises_is_not_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    source, target = random_model(SHAPES, 0), Stubborn(random_model(SHAPES, 1))
    with fleet(source) as here:
        serving = here.add(target)
        here.wait(1)
        here.sender.send_weights(timeout_s=5)
        target.fails = True
        with pytest.raises(Exception, match="planted"):
            here.sender.send_weights(timeout_s=5)
        until(lambda: bool(serving.errors))
    assert lines(caplog, "sync.receiver", logging.WARNING) == []
    assert lines(caplog, "sync.sender", logging.WARNING) == []


def test_a_staging_thread_warns_of_what_it_keeps_to_itself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.sync.staging_thread._TURN_S", 0.02)
    monkeypatch.setattr("deltasync.sync.staging_thread._RETRY_S", 0.02)
    with engine() as here, StagingThread(here.receiver) as staging:
        here.join(staging)
        here.sender.close()  # from now on nobody listens
        until(lambda: bool(lines(caplog, "sync.staging_thread", logging.WARNING)))
        turns = [0]
        stage = here.receiver.stage

        def counted(*, timeout_s: float) -> bool:
            turns[0] += 1
            return stage(timeout_s=timeout_s)

        monkeypatch.setattr(here.receiver, "stage", counted)
        until(lambda: turns[0] > 8)
    told = lines(caplog, "sync.staging_thread", logging.WARNING)
    assert 1 <= len(told) <= 3  # it was lost, and does not come back
    assert all(one.startswith("engine[0/1] rejoins, after a sync that failed: ") for one in told)


def test_commands_log_nothing_beside_what_they_say() -> None:
    code = (
        "import logging, sys\nfrom deltasync.cli import main\nsys.argv = ['', '--version']\n"
        "try: main()\nfinally: logging.getLogger('deltasync.sync.sender').warning('doubled')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_the_library_installs_no_handler() -> None:
    code = (
        "import logging, deltasync.sync.sender; print(logging.getLogger('deltasync').handlers, "
        "logging.getLogger().handlers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[] []\n", done.stderr
