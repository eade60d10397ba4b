"""A trainer and its engine go on among strangers; `python -m benchmarks strangers` for long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app


@pytest.mark.parametrize(
    "options",
    [["--secret"], ["--no-secret"], ["--link", "local"]],
    ids=["secret", "no secret", "unix socket"],
)
def test_strangers_do_not_hold_a_trainer_up(tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "strangers.jsonl"
    done = CliRunner().invoke(app, ["strangers", "--seconds", "10", "--out", str(path), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["failures"] == []
    assert found["syncs"] > 3
