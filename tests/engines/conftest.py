"""Engines are large: their tests are collected where they are installed, by `make test-engines`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def _spawned() -> Iterator[None]:
    """Processes begin anew: engines look at the environment, which tests set, when imported."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
