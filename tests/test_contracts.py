"""The contracts of transports and targets find ends that break them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import faulty_ends

ROOT = Path(__file__).parents[1]
BROKEN = [(n, test) for n, one in vars(faulty_ends).items() for test in getattr(one, "fails", ())]


@pytest.fixture(scope="module")
def report() -> str:
    """What pytest says of them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfp", "--tb=no", "-p", "no:cacheprovider"]
        + [f"tests/faulty_ends.py::{name}::{test}" for name, test in BROKEN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "test"), BROKEN)
def test_an_end_that_breaks_a_rule_is_found(report: str, name: str, test: str) -> None:
    assert f"FAILED tests/faulty_ends.py::{name}::{test}" in report
