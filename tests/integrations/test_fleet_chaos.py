"""A short chaos of a fleet: engines are killed, stopped, added and removed, and all is checked."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app


@pytest.mark.promise(
    "All or nothing",
    "Every version that an engine of a fleet serves is one that was committed, whatever is "
    "killed, stopped, added or removed.",
)
@pytest.mark.slow
def test_a_fleet_survives_what_befalls_its_engines() -> None:
    words = ["fleet-chaos", "--versions", "16", "--seed", "3", "--engines", "5", "--rolling"]
    done = CliRunner().invoke(app, words)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == []
    assert done.exit_code == 0, done.output
    assert found["versions"] >= 12
    assert sum(found["faults"].values()) > 0
    assert found["events"]["named"] > 16
