"""`deltasync bench` from the outside, and the process that follows it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deltasync.cli.probes.follower import followed, make_model
from deltasync.errors import PeerLost
from tests.cli.command import call, run_forked, start, wait_until_gone


def test_json_is_one_object_of_both_ways() -> None:
    done = run_forked("bench", "--numel", "300k", "--density", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["numel"] == 300_000
    assert found["link"] == "shared_memory"
    assert 0.01 < found["nnz"] / found["numel"] < 0.03
    sent = found["payload_bytes"]
    assert 6 * found["nnz"] <= sent["changed"] < sent["everything"]
    assert sent["everything"] >= 2 * found["numel"]
    for quantity in ("total_s", "diff_s", "pause_s"):
        assert found[quantity]["changed"] > 0
        assert found[quantity]["everything"] > 0


def test_what_is_piped_is_a_plain_table() -> None:
    done = run_forked("bench", "--numel", "100k")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    first, headings, *rows = done.stdout.splitlines()
    assert first.startswith("100,000 bf16 elements on cpu, 1.")
    assert headings.split() == ["what", "changed", "everything", "ratio"]
    assert [row.split()[-1][-1] for row in rows[:4]] == list("xxxx")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--numel", "many"], "--numel"),
        (["--numel", "0"], "--numel"),
        (["--numel", "-5"], "--numel"),
        (["--numel", "1T"], "--numel"),
        (["--numel", "999999G"], "--numel"),
        (["--density", "0"], "--density"),
        (["--density", "1.1"], "--density"),
        (["--density", "nan"], "--density"),
        (["--numel", "1000", "--density", "0.01"], "--density"),
        (["--device", "cuda"], "--device"),
        (["--device", "tpu"], "--device"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_options_get_one_line(arguments: list[str], said: str) -> None:
    done = call("bench", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_a_second_process_that_cannot_follow_is_heard() -> None:
    module = make_model(10, "cpu")
    with (
        pytest.raises(PeerLost, match=r"second process ended: RuntimeError: .*nonsense"),
        followed(module, "shared_memory", devices=("cpu", "nonsense")),
    ):
        pass


@pytest.mark.parametrize(
    ("kill", "number", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
)
def test_ctrl_c_and_sigterm_end_it_quietly(
    kill: Callable[[int, int], None], number: int, code: int
) -> None:
    with TemporaryDirectory() as folder:
        running = start("bench", "--numel", "50M", TMPDIR=folder)
        try:
            follower = wait_until_followed(running.pid)
            kill(running.pid, number)
            out, errors = running.communicate(timeout=30)
        finally:
            running.kill()
            running.close()
        assert (running.returncode, out, errors) == (code, "", "")
        wait_until_gone(follower)
        assert not list(Path(folder).iterdir())


def wait_until_followed(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children")
    for _ in range(600):
        if found := children.read_text().split():
            return int(found[0])
        signal.sigtimedwait([], 0.1)
    raise AssertionError("no second process")
