"""The recipe for torchrun, run in the environment that it makes, and by it with a rank killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.programs import run_ranks

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "docs/examples/torchrun_ranks.py"
JOINED = re.compile(r"step (\d+) is v1: 3 ranks joined, (\d) of them by a full sync, (\d+) bytes")
DELTA = re.compile(r"step (\d+) is v(\d+): [\d.]+% changed, \d+ bytes")
# Of several ranks, on one line at times: torchrun starts them with -u, so that the end of a line is
# written by itself.
HOLDS = re.compile(r"rank (\d) holds the trainer's bits")

pytestmark = pytest.mark.timeout(170)


@contextmanager
def ranks(*options: str, recipe_options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """torchrun, which writes what its four ranks print, and ends them when it is told to end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", *options, str(RECIPE), *recipe_options]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as torchrun:
        try:
            yield torchrun
        finally:
            torchrun.terminate()


def lines_of(torchrun: subprocess.Popen[str]) -> Iterator[str]:
    assert torchrun.stdout is not None
    yield from map(str.rstrip, torchrun.stdout)


def kill(torchrun: subprocess.Popen[str], *, rank: int) -> None:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    mine = f"RANK={rank}\0".encode()
    [pid] = [pid for pid in children if b"\0" + mine in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(int(pid), signal.SIGKILL)


def test_ranks_hold_the_trainer_s_bits_after_every_step() -> None:
    done = run_ranks(RECIPE, 4)
    assert [rank.returncode for rank in done] == [0, 0, 0, 0], done
    first, *others = "".join(rank.stdout for rank in done).splitlines()
    assert JOINED.fullmatch(first)
    deltas = [match.groups() for line in others if (match := DELTA.fullmatch(line))]
    assert deltas == [(str(step), str(step + 1)) for step in range(1, 6)]
    assert sorted(HOLDS.findall("\n".join(others))) == ["1", "2", "3"]


def test_ranks_that_are_restarted_resume_and_are_sent_nothing(tmp_path: Path) -> None:
    recipe_options = ("--steps", "100", "--checkpoint", str(tmp_path / "checkpoint"))
    joinings, seen = [], [0]
    with ranks("--max-restarts", "1", recipe_options=recipe_options) as torchrun:
        for line in lines_of(torchrun):
            if match := JOINED.fullmatch(line):
                joinings.append([*map(int, match.groups()), seen[-1]])
            elif match := DELTA.fullmatch(line):
                seen.append(int(match[1]))
                if seen[-1] == 3 and len(joinings) == 1:
                    kill(torchrun, rank=2)
            seen += [-1] * len(HOLDS.findall(line))
        assert torchrun.wait(30) == 0
    (_, full, _, _), (resumed, full_again, payload, reached) = joinings
    assert (full, full_again, payload) == (3, 0, 0)
    assert reached - 1 <= resumed <= reached  # it was saved after it was sent
    assert seen[-4:] == [100, -1, -1, -1]
