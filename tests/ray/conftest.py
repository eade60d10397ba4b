"""Ray is large: its tests are collected where it is installed, by `make test-ray`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.engines.environment import ROOT

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[None]:
    """In which Ray starts clusters that leave nothing behind."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as files:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is left in the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", files)  # a short path: sockets lie in it
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
