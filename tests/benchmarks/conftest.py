"""Processes of the benchmarks are forked from where torch is imported already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import processes
from tests.programs import Program

MODULE = """
import runpy, sys
from benchmarks import processes
from tests.benchmarks.conftest import start
processes.start = start
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start(module: str, *words: str, is_told: bool = False, own_session: bool = False) -> Program:
    """As `processes.start`. Each has a session of its own, and ends when its stdin does."""
    return Program(MODULE, module, *words, is_told=is_told, is_overheard=False)


@pytest.fixture(scope="package", autouse=True)
def _forked_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start", start)
        yield
