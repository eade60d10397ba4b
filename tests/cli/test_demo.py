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
from safetensors.torch import load_file

from tests.cli.command import call, refused, run_forked, shown, start, wait_until_gone
from tests.observe.test_report import Page
from tests.worlds.programs import Program

QUICK = ["demo", "--quick", "--json"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a demo of four versions wrote, with its store and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    words = [*QUICK, "--steps", "3", "--out", folder, "--store", folder / "store"]
    done = run_forked(*words)
    assert done.returncode == 0, done.stderr
    assert "equal in both processes" in done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_each_version_is_a_line_and_checked(out: Path) -> None:
    text = (out / "stdout").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["kind"] for record in records] == ["full", *["delta"] * 3]
    for record in records:
        assert record["verified"] is True
        assert 0 <= record["reward"] <= 1
    for delta in records[1:]:
        assert 0 < delta["nnz"] < 0.3 * delta["numel"]
        assert delta["payload_bytes"] < delta["dense_bytes"]
    assert (out / "records.jsonl").read_text() == text
    assert json.loads((out / "summary.json").read_text())["before"]["num_prompts"] >= 256
    first, last = (load_file(out / f"{name}.safetensors") for name in ("first", "last"))
    changes = sum(int((last[name] != first[name]).sum()) for name in first)
    assert max(delta["nnz"] for delta in records[1:]) <= changes
    assert sum(tensor.numel() for tensor in last.values()) == records[0]["numel"]


def test_a_store_has_every_version_bit_for_bit(out: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (out / "stdout").read_text().splitlines()]
    digests = [record["store"]["digest"] for record in records]
    versions = shown("log", out / "store")["versions"]
    assert [(one["version"], one["digest"]) for one in versions][::-1] == [*enumerate(digests, 1)]
    for to, name in ((1, "first"), (4, "last")):
        made = tmp_path / name
        found = shown("fetch", out / "store", "--to", str(to), "--out", made)
        assert found["digest"] == digests[to - 1]
        served = load_file(made / "model.safetensors")
        for key, tensor in load_file(out / f"{name}.safetensors").items():
            assert served[key].equal(tensor)


def test_its_log_is_drawn(out: Path, tmp_path: Path) -> None:
    log, page = out / "run.jsonl", out / "run.html"
    found = shown("report", log)
    assert found == {"out": str(page), "bytes": page.stat().st_size, "lines": 9, "skipped": []}
    parsed = Page(page.read_text(encoding="utf-8"))
    assert "Density by layer" in parsed.texts
    torn, page = tmp_path / "torn.jsonl", tmp_path / "page.html"
    torn.write_bytes(log.read_bytes()[:-20])
    done = call("report", torn, "--out", page)
    assert (done.returncode, done.stderr) == (0, "line 9 was skipped: torn\n")
    assert done.stdout.startswith(f"{page}: 8 lines, ")
    assert "No such file" in refused("report", tmp_path / "gone.jsonl")
    assert "no line of it is of a log" in refused("report", __file__, "--out", tmp_path / "x")
    assert "is the log itself" in refused("report", log, "--out", log)


@pytest.mark.parametrize(
    ("end", "transport", "code"),
    [
        (signal.SIGINT, "shared_memory", 130),
        (signal.SIGKILL, "gloo", -9),
        ("its reader leaves", "shared_memory", 141),
        ("the rollout process dies", "gloo", 1),
    ],
)
def test_both_processes_end_quietly_however_it_ends(
    end: signal.Signals | str, transport: str, code: int
) -> None:
    with running_demo(transport) as (trainer, rollout):
        if end == "its reader leaves":
            trainer.stdout.close()
        elif end == "the rollout process dies":
            os.kill(rollout, signal.SIGKILL)
        else:
            trainer.send_signal(int(end))
        errors = trainer.stderr.read()  # until both have closed it
        assert "Traceback" not in errors
        assert trainer.wait(timeout=60) == code
        *_, last = errors.splitlines()
        assert bool(re.match(r"[A-Z]\w+: ", last)) == (code == 1), last  # it says why
        wait_until_gone(rollout)


@contextmanager
def running_demo(transport: str) -> Iterator[tuple[Program, int]]:
    """A demo past its first delta, and the id of its rollout process."""
    folder = tempfile.TemporaryDirectory()  # a killed trainer cannot clean up after itself
    words = [*QUICK, "--steps", "1000000", "--transport", transport]
    trainer = start(*words, TMPDIR=folder.name)
    try:
        for _ in range(2):
            assert trainer.stdout.readline()
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        (rollout,) = map(int, children)
        yield trainer, rollout
    finally:
        trainer.kill()
        trainer.wait()
        folder.cleanup()
        trainer.close()
