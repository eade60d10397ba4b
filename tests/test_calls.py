"""A warm delta stays short: files that it runs through, and calls between them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(320)
def test_a_warm_delta_takes_no_more_than_its_goal() -> None:
    command = [sys.executable, "-m", "benchmarks.calls"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    counts = re.findall(r"(\d+) [a-z ]+\(at most (\d+)\)", done.stdout)
    assert len(counts) == 8  # files and calls of both ends, over two links
    assert all(int(number) <= int(most) for number, most in counts), done.stdout
