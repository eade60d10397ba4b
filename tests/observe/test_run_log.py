"""The log of a run: whole lines, whatever happens to the process and the disk."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.errors import ConfigError, PeerLost
from deltasync.observe.run_lines import read_run
from deltasync.observe.run_log import RunLog
from tests.observe.made import failed, published, received, sync


def test_every_kind_of_event_is_a_line_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lost = {"x[0/1]": "PeerLost: gone"}
    with RunLog(path) as log:
        log(sync(lost=lost, warnings=("look",)))
        log(received(was_dirty=True))
        log(published())
        log(failed(PeerLost("gone"), role="receiver", name="a[0/1]", is_dirty=True, lost=lost))
    log(sync())  # closed
    found = read_run(path)
    assert found.skipped == ()
    first, sent, got, made, broken = found.lines
    assert (first.event, sent.event, broken.event) == ("run", "sync", "failed")
    assert (sent.version, sent.lost) == (2, lost)
    assert (got.event, made.event) == ("receive", "publish")
    assert (broken.error, broken.message, broken.is_dirty) == ("PeerLost", "gone", True)
    for line in path.read_text().splitlines():
        assert json.loads(line)["time"] > 1e9


@pytest.mark.promise(
    "What operators see",
    "A killed process leaves at most one torn line in a run log; the report skips it and says so.",
)
@given(cut=st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_a_torn_line_is_reported_and_skipped_and_what_follows_is_read(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    with RunLog(path) as log:
        log(sync())
        log(sync(version=3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    torn = read_run(path)
    assert len(torn.lines) == (3 if cut == 1 else 2)
    assert torn.skipped == (() if cut == 1 else ((3, "torn"),))
    with RunLog(path) as log:
        log(sync(version=4))
    found = read_run(path)
    assert [line.version for line in found.lines if line.event == "sync"][-1] == 4
    assert len(found.skipped) == len(torn.skipped)


@pytest.mark.promise("What operators see", "A full disk costs lines of the log, and no sync.")
def test_a_full_disk_is_said_once_and_costs_no_sync(caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with RunLog("/dev/full") as log:
        for _ in range(3):
            log(sync())
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warned] == [
        "/dev/full: No space left on device; lines are missing from now on"
    ]


def test_what_cannot_be_opened_or_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        RunLog(tmp_path / "gone" / "run.jsonl")
    (tmp_path / "other").write_text('{"event": "stranger", "time": 1}\nnot json\n\n')
    with pytest.raises(ConfigError, match="no line of it is of a log"):
        read_run(tmp_path / "other")


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b'{"event": "run", "time": 1, "format": 2, "deltasync": "1"}',
        b"[" * 100_000,
    ],
)
def test_lines_that_are_none_are_skipped_with_a_reason(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log(sync())
    path.write_bytes(line + b"\n" + path.read_bytes())
    found = read_run(path)
    assert len(found.lines) == 2
    ((number, why),) = found.skipped
    assert number == 1
    assert why
