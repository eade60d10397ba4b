"""`deltasync doctor` from the outside, and its judgement of versions."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deltasync.cli.probes.checks import Engine, engine_check
from tests.cli.command import COMMAND, ROOT, run, run_forked

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
    ("first", "last", "tried"),
    [("0.1", "0.2", "0.1 to 0.2"), ("2.11", "2.99", None), ("2", "2", None), ("99", "99", "99")],
)
def test_a_version_that_was_not_tried_is_no_fault(first: str, last: str, tried: str | None) -> None:
    assert engine_check(Engine("X", ("no-such-package",), first, last)).ok is None
    check = engine_check(Engine("X", ("no-such-package", "torch"), first, last))
    assert check.ok is (True if tried is None else None)
    assert check.found.startswith(version("torch"))
    assert check.found.endswith("" if tried is None else f"was tried with {tried}")
