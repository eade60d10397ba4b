"""`deltasync demo` and `report` from the outside: what they print and write, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.command import output, refused, run_forked, start, wait_until_gone
from tests.observe.test_report import Page
from tests.worlds.programs import Program

QUICK = ["demo", "--quick"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a demo of four versions wrote."""
    folder = tmp_path_factory.mktemp("run")
    done = run_forked(*QUICK, "--steps", "3", "--out", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "equal in both processes" in done.stdout
    assert len(re.findall(r"^ +\d .* agrees$", done.stdout, re.MULTILINE)) == 4
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["full", *["delta"] * 3]
    return folder


def test_its_log_is_drawn(out: Path, tmp_path: Path) -> None:
    log, page = out / "run.jsonl", out / "run.html"
    assert output("report", log).startswith(f"{page}: 5 lines, 0 skipped, ")
    assert "Density" in Page(page.read_text(encoding="utf-8")).texts
    torn, page = tmp_path / "torn.jsonl", tmp_path / "page.html"
    torn.write_bytes(log.read_bytes()[:-20])
    assert output("report", torn, "--out", page).startswith(f"{page}: 4 lines, 1 skipped, ")
    assert "1 line was skipped, the first is line 5: torn" in page.read_text(encoding="utf-8")
    assert "No such file" in refused("report", tmp_path / "gone.jsonl")
    assert "no line of it is of a log" in refused("report", __file__, "--out", tmp_path / "x")
    assert "is the log itself" in refused("report", log, "--out", log)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGKILL, -9),
        ("the rollout process dies", 1),
    ],
)
def test_both_processes_end_quietly_however_it_ends(end: signal.Signals | str, code: int) -> None:
    with running_demo() as (trainer, rollout):
        if end == "the rollout process dies":
            os.kill(rollout, signal.SIGKILL)
        else:
            trainer.send_signal(int(end))
        errors = trainer.stderr.read()  # until both have closed it
        assert "Traceback" not in errors
        assert trainer.wait(timeout=60) == code
        assert bool(re.match(r"[A-Z]\w+: ", errors)) == (code == 1), errors  # it says why
        wait_until_gone(rollout)


@contextmanager
def running_demo() -> Iterator[tuple[Program, int]]:
    """A demo past its first delta, and the id of its rollout process."""
    folder = tempfile.TemporaryDirectory()  # a killed trainer cannot clean up after itself
    trainer = start(*QUICK, "--steps", "1000000", TMPDIR=folder.name)
    try:
        while " delta " not in (line := trainer.stdout.readline()):
            assert line
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        (rollout,) = map(int, children)
        yield trainer, rollout
    finally:
        trainer.kill()
        trainer.wait()
        folder.cleanup()
        trainer.close()
