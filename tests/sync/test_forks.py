"""Children that are forked beside a sync: parents go on, and are dead when they are dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from deltasync.testing.processes import Child, ChildFailed
from tests.sync.forks import take_part, until

KINDS = ["shared_memory", "collective"]
ENDS = ["train", "serve"]

UNCLOSED = """
from torch import nn
from deltasync import ModuleSource, WeightSender
from deltasync.transports import inprocess

class Run: ...

run = Run()
run.itself = run  # collected as the interpreter ends
run.sender = WeightSender(ModuleSource(nn.Linear(2, 2)), inprocess.Sender())
"""


@contextmanager
def both(kind: str, mode: str, folder: Path) -> Iterator[dict[str, Child]]:
    """Both ends; whatever is left of them and of their children is killed at the end."""
    with ExitStack() as stack:
        ends = {end: stack.enter_context(Child(take_part, end, kind, folder, mode)) for end in ENDS}
        try:
            yield ends
        finally:
            for path in folder.glob("*.pid"):
                with suppress(ProcessLookupError):
                    os.killpg(int(path.read_text()), signal.SIGKILL)


@pytest.mark.promise(
    "Children",
    "A forked child that closes, exits or loads data affects neither end; its own calls raise "
    "`TransportClosed`.",
)
@pytest.mark.parametrize("mode", ["ends", "exits", "loads"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_children_that_close_exit_or_load_data_disturb_nobody(
    kind: str, end: str, mode: str, tmp_path: Path
) -> None:
    with both(kind, f"{end}-{mode}", tmp_path) as ends:
        for process in ends.values():
            process.wait(timeout_s=80)
        assert not (tmp_path / "noticed").exists()


@pytest.mark.promise(
    "Children",
    "A child or a program that keeps running keeps no connection of a dead process open.",
)
@pytest.mark.parametrize("mode", ["outlives", "starts"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_lives_on_keeps_no_dead_end_alive(
    kind: str, end: str, mode: str, tmp_path: Path
) -> None:
    with both(kind, f"{end}-{mode}", tmp_path) as ends:
        until(lambda: not ends[end].is_alive, 80)
        died = time.monotonic()
        assert ends[end].traceback is None
        if end == "train":
            ends["serve"].wait(timeout_s=10)
            assert (tmp_path / "noticed").exists()
        else:
            with pytest.raises(ChildFailed, match=r"StepApplied.*(disconnected|PeerLost)"):
                ends["train"].wait(timeout_s=10)
        assert time.monotonic() - died < 10


def test_a_program_that_closes_nothing_ends_without_a_word() -> None:
    command = [sys.executable, "-c", UNCLOSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout + done.stderr == ""
