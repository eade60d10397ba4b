"""Hypothesis profiles, and skipping of what this machine has no device for."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import replace
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from pathlib import Path
from types import FunctionType

import pytest
import torch
from hypothesis import Phase, settings

from deltasync.cli import COMMANDS

for _name, _examples in {"dev": 50, "ci": 200, "nightly": 5000}.items():
    # No deadline: the first example pays for lazy imports, and shared machines stall. CI judges a
    # change by the same examples as the one before.
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, derandomize=_name == "ci"
    )
# Where it is enough that something fails: not made smaller, which takes longer than to find it.
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def _speed_up_interpreter() -> None:
    """Let Triton's interpreter patch its language once for each module of kernels.

    It does so for each call of a function in a kernel, which takes most of the time of our tests.
    Nor does it compute whether integers overflow, for assertions that it leaves out.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    modules, patch = set(), interpreter._patch_lang

    def patch_once(function: FunctionType) -> object:
        if function.__module__ not in modules:
            modules.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_once


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
    _speed_up_interpreter()
    # Tests on GPUs have processes whose torch starts anew, in an environment of their own.
    multiprocessing.set_start_method("forkserver")

# What processes that are forked from there do not import again, which takes seconds.
set_forkserver_preload(
    [
        "pytest",  # part of the main module, which every process looks at
        "hypothesis",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "deltasync.testing.links",
        "deltasync.files.frame_check",
        *(f"deltasync.cli.{name}" for name in COMMANDS),
    ]
)

# Before anything imports them: failures of the contracts show the values they compared.
pytest.register_assert_rewrite(
    "deltasync.testing.transport", "deltasync.testing.links", "tests.transports.slot_contract"
)

# These begin first: then no worker ends with a long file. The two that take gigabytes lie apart.
LONGEST = [
    "delta/test_compiled.py",
    "sync/test_interrupts.py",
    "sync/test_large.py",
    "sync/test_processes.py",
    "integrations/test_fleet.py",
    "test_calls.py",
    "sync/test_target_histories.py",
    "sync/test_history.py",
    "delta/test_ends.py",
    "cli/test_command.py",
    "sync/test_forks.py",
    "cli/test_demo.py",
    "cli/test_files.py",
    "sync/test_group.py",
    "integrations/test_torchrun.py",
    "cli/test_doctor.py",
    "transports/test_collective.py",
    "delta/test_large.py",
]
TESTS = Path(__file__).parent

DEVICES_NEEDED = {"gpu": 1, "multigpu": 2}


@pytest.fixture(scope="session", autouse=True)
def _imports() -> None:
    """Let them begin ahead, where tests have a use for them."""
    if "deltasync.testing.processes" in sys.modules:
        ensure_running()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order by file; within one, tests stay in order."""
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, needed in DEVICES_NEEDED.items():
        if item.get_closest_marker(marker) and torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA device(s)")
