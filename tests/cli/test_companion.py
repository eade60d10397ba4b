"""What `doctor` and `demo` start ends when they do, however and whenever they end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deltasync.cli.probes.follower import followed, make_model
from deltasync.errors import PeerLost
from tests.cli.command import ENVIRONMENT, MAIN, wait_until_gone
from tests.worlds.programs import Program

# Sends a signal to itself as soon as a second process runs, before anything else is done.
SIGNALLED = """
import os, subprocess, sys
from deltasync.cli import main

class Popen(subprocess.Popen):
    def __init__(self, *words, **settings):
        super().__init__(*words, **settings)
        os.write(2, b"%d\\n" % self.pid)
        os.kill(os.getpid(), number)

number = int(sys.argv.pop())
subprocess.Popen = Popen
main()
"""
DOCTOR, DEMO = ["doctor"], ["demo", "--quick"]


@contextmanager
def running(code: str, *words: str) -> Iterator[Program]:
    """A command whose files are looked for in a folder of its own."""
    with TemporaryDirectory(prefix="") as folder:
        process = Program(code, *words, environment=ENVIRONMENT | {"TMPDIR": folder})
        try:
            yield process
        finally:
            process.kill()
            if not process.stdout.closed:
                process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert not list(Path(folder).iterdir())


def descendants(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children")
    try:
        found = [int(child) for child in children.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    return found + [one for child in found for one in descendants(child)]


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (DOCTOR, signal.SIGINT, 130),
        (DOCTOR, signal.SIGHUP, 129),
        (DOCTOR, signal.SIGTERM, 143),
        (DOCTOR, signal.SIGKILL, -9),
        (DEMO, signal.SIGKILL, -9),
    ],
)
def test_a_signal_as_soon_as_it_starts_leaves_no_process(
    words: list[str], number: int, code: int
) -> None:
    with running(SIGNALLED, *words, str(int(number))) as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        (companion,) = errors.split()
        wait_until_gone(int(companion))


def test_what_is_killed_within_a_trial_leaves_no_process() -> None:
    with running(MAIN, *DOCTOR) as process:
        while not descendants(process.pid):
            assert process.poll() is None
            signal.sigtimedwait([], 0.05)
        signal.sigtimedwait([], 1.0)
        found = descendants(process.pid)
        process.kill()
        process.wait()
        for companion in found:
            wait_until_gone(companion)


def test_a_second_process_that_cannot_follow_is_heard() -> None:
    with (
        pytest.raises(PeerLost, match=r"second process ended: RuntimeError: .*nonsense"),
        followed(make_model("cpu"), "shared_memory", devices=("cpu", "nonsense")),
    ):
        pass
