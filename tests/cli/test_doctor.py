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
import torch

from deltasync.cli.probes.checks import ENGINES, Engine, engine_check, numbers
from deltasync.cli.probes.trial import Trial, sync_tiny_models
from deltasync.delta.device import DeviceDetector
from deltasync.delta.live import DeviceLane
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from tests.cli.command import COMMAND, ROOT, run, run_forked, start, wait_until_gone
from tests.sync.interpreted import one_kernel_at_a_time

__all__ = ["one_kernel_at_a_time"]  # pytest uses it

ADVICE = re.compile(r"^ {20,}\S", flags=re.MULTILINE)


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    found = json.loads(done.stdout)
    assert found["works"] is (done.returncode == 0)
    return {check["name"]: check for check in found["checks"]}


def test_links_are_tried_and_one_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / (100 * "x")  # longer than the path of a socket may be
    folder.mkdir()
    done = run_forked("doctor", "--json", TMPDIR=str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    found = rows(done)
    for name in ("Python", "torch", "gloo"):
        assert found[name]["ok"] is True
    for name in ("cuda_ipc", "nccl"):
        assert found[name]["ok"] is None
    if find_spec("vllm") is None:
        assert [found[name]["ok"] for name in ("vLLM", "plugin of vLLM")] == [None, None]
    link = found["shared_memory"]
    assert link["ok"] is False
    assert "path too long" in link["found"]
    assert link["advice"]
    assert not list(folder.iterdir())


def test_without_any_link_the_exit_code_is_1(tmp_path: Path) -> None:
    """What is piped has no colours, and each "no" has advice, here also that of vLLM's plugin."""
    (tmp_path / "vllm.py").touch()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    command = f"ulimit -n 9; {' '.join(COMMAND)} doctor"
    done = run("bash", "-c", command, VLLM_PLUGINS="other", PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"plugin of vLLM +no ", done.stdout)
    assert done.stdout.splitlines()[-1] == "deltasync does not work here: see above."
    assert len(ADVICE.findall(done.stdout)) >= len(re.findall(r"^\S.* no  ", done.stdout, re.M)) > 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_what_ends_within_a_trial_leaves_no_process(number: int, code: int) -> None:
    """Ctrl-C comes when trials begin, and to all processes."""
    with tempfile.TemporaryDirectory(prefix="") as folder:
        process = start("doctor", TMPDIR=folder)
        while not (found := descendants(process.pid)) or (
            number != signal.SIGINT and not list(Path(folder).rglob("weights.sock"))
        ):
            assert process.poll() is None
            time.sleep(0.05)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait() == code
        for one in found:
            wait_until_gone(one)
        errors = process.stderr.read()
        assert "Traceback" not in errors
        assert "KeyboardInterrupt" not in errors
        process.close()
        if number != signal.SIGKILL:
            assert not list(Path(folder).iterdir())


def descendants(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children")
    try:
        found = [int(child) for child in children.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    return found + [one for child in found for one in descendants(child)]


def test_a_trial_that_hangs_is_ended_with_its_processes_and_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tmp_path = Path(tempfile.mkdtemp())  # short enough for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Trial("shared_memory") as trial:
        deadline = time.monotonic() + 60
        while not list(tmp_path.rglob("weights.sock")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pid = trial._process.pid
        assert pid is not None
        found = [pid, *descendants(pid)]
        os.killpg(pid, signal.SIGSTOP)
        assert trial.problem(time.monotonic()) == "it did not end in time"
    tmp_path.rmdir()  # which is empty
    for one in found:
        wait_until_gone(one)


@pytest.mark.skipif(torch.cuda.is_available(), reason="doctor runs it where there is a GPU")
@pytest.mark.parametrize(("form", "room"), [(None, None), (None, 0), (BlockFp8(), None)], ids=str)
def test_the_trial_of_kernels_runs_those_of_both_ends(
    form: Form | None, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set[type]()
    for end, name in ((DeviceDetector, "find"), (DeviceLane, "changes")):
        call = getattr(end, name)

        def noted(self: object, *args: Any, call: Any = call) -> Any:
            used.add(type(self))
            return call(self, *args)

        monkeypatch.setattr(end, name, noted)
    sync_tiny_models(torch.device("cpu"), form, room)
    assert used == {DeviceDetector, DeviceLane}


@pytest.mark.parametrize(
    ("first", "last", "tried"),
    [("0.1", "0.2", "0.1 to 0.2"), ("2.11", "2.99", None), ("2", "2", None), ("99", "99", "99")],
)
def test_a_version_that_was_not_tried_is_no_fault(first: str, last: str, tried: str | None) -> None:
    assert engine_check(Engine("X", ("no-such-package",), first, last)).ok is None
    check = engine_check(Engine("X", ("no-such-package", "torch"), first, last))
    assert check.ok is (True if tried is None else None)
    assert check.found.startswith(version("torch"))
    assert check.found.endswith("" if tried is None else f"was tried with {tried}")


def test_the_versions_known_are_those_that_are_tested() -> None:
    lines = (ROOT / "constraints-engines.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    for engine in ENGINES:
        for package in set(engine.packages) & set(tested):
            first, last = numbers(engine.first), numbers(engine.last)
            assert first <= numbers(tested[package])
            assert numbers(tested[package])[: len(last)] <= last
