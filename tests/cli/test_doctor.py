"""`deltasync doctor` from the outside, and its judgement of versions."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deltasync.cli.probes.checks import ENGINES, Engine, engine_check, numbers
from deltasync.cli.probes.trial import Trial
from tests.cli.command import COMMAND, ROOT, run, run_forked

DOCTOR = [*COMMAND, "doctor"]
ADVICE = re.compile(r"^ {20,}\S", flags=re.MULTILINE)


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    found = json.loads(done.stdout)
    assert found["works"] is (done.returncode == 0)
    return {check["name"]: check for check in found["checks"]}


def test_links_of_a_cpu_are_tried_and_work() -> None:
    done = run_forked("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = rows(done)
    assert [found[name]["ok"] for name in ("Python", "torch")] == [True, True]
    assert [found[name]["ok"] for name in ("shared_memory", "gloo")] == [True, True]
    assert [found[name]["ok"] for name in ("cuda_ipc", "nccl")] == [None, None]
    if find_spec("vllm") is None:
        assert [found[name]["ok"] for name in ("vLLM", "plugin of vLLM")] == [None, None]
    assert done.stderr == ""


def test_a_link_that_fails_says_why_and_another_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / (100 * "x")  # longer than the path of a socket may be
    folder.mkdir()
    done = run_forked("doctor", "--json", TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    link = rows(done)["shared_memory"]
    assert link["ok"] is False
    assert "path too long" in link["found"]
    assert link["advice"]


def test_without_any_link_the_exit_code_is_1() -> None:
    done = run("bash", "-c", f"ulimit -n 9; {' '.join(DOCTOR)}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "deltasync does not work here: see above."
    assert len(ADVICE.findall(done.stdout)) >= 2


def test_what_is_piped_has_no_colours_and_each_no_has_advice(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").touch()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = run(*DOCTOR, VLLM_PLUGINS="other", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"plugin of vLLM +no ", done.stdout)
    assert done.stdout.splitlines()[-1] == "deltasync works here."
    assert len(ADVICE.findall(done.stdout)) == len(re.findall(r"^\S.* no  ", done.stdout, re.M))


def test_a_trial_that_hangs_is_ended_with_its_processes_and_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tmp_path = Path(tempfile.mkdtemp())  # short enough for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Trial("shared_memory") as trial:
        deadline = time.monotonic() + 60
        while not list(tmp_path.rglob("weights.sock")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert trial._process is not None
        os.killpg(trial._process.pid, signal.SIGSTOP)
        assert trial.problem(time.monotonic()) == "it did not end in time"
        group = trial._process.pid
    tmp_path.rmdir()  # which is empty
    deadline = time.monotonic() + 30
    while True:  # until the system has taken its children away
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("first", "last", "tried"),
    [
        ("0.1", "0.2", "0.1 to 0.2"),
        ("2.11", "2.99", None),
        ("2", "2", None),
        ("99", "99", "99"),
    ],
)
def test_a_version_that_was_not_tried_is_no_fault(first: str, last: str, tried: str | None) -> None:
    assert engine_check(Engine("X", ("no-such-package",), first, last)).ok is None
    check = engine_check(Engine("X", ("no-such-package", "torch"), first, last))
    if tried is None:
        assert (check.ok, check.found) == (True, version("torch"))
    else:
        assert check.ok is None
        assert check.found.startswith(version("torch"))
        assert check.found.endswith(f"was tried with {tried}")


def test_the_versions_known_are_those_that_are_tested() -> None:
    lines = (ROOT / "constraints-engines.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    for engine in ENGINES:
        for package in set(engine.packages) & set(tested):
            first, last = numbers(engine.first), numbers(engine.last)
            assert first <= numbers(tested[package])
            assert numbers(tested[package])[: len(last)] <= last
