"""The recipe for torchrun, run in the environment that it makes, and by it with ranks killed."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.worlds.ranks import free_ports

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "docs/examples/torchrun_ranks.py"
JOINED = re.compile(
    r"step (\d+) is v(\d+): (\d) ranks joined, (\d) of them by a full sync, (\d+) bytes(; lost .*)?"
)
DELTA = re.compile(r"step (\d+) is v(\d+): [\d.]+% changed, \d+ bytes")
SENT = re.compile(DELTA.pattern + "(?:; lost .*)?")
NOBODY = re.compile(r"step (\d+): (NoReceivers|SyncAborted): .*")
# Of several ranks, on one line at times: torchrun starts them with -u, so that the end of a line is
# written by itself.
HOLDS = re.compile(r"rank (\d) holds the trainer's bits")

Host = Sequence[str]
"""What runs a command on a host."""


@contextmanager
def ranks(
    *options: str, recipe: Sequence[str], per_node: int = 4, host: Host = ()
) -> Iterator[subprocess.Popen[str]]:
    """torchrun, which writes what its ranks print. All of it ends with the context."""
    command = [*host, sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--nproc-per-node", str(per_node), str(RECIPE), *recipe]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as torchrun:
        try:
            yield torchrun
        finally:
            kill_node(torchrun)


def lines_of(torchrun: subprocess.Popen[str]) -> Iterator[str]:
    assert torchrun.stdout is not None
    yield from map(str.rstrip, torchrun.stdout)


def children(torchrun: subprocess.Popen[str]) -> list[int]:
    path = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def kill(torchrun: subprocess.Popen[str], *, rank: int) -> None:
    mine = f"\0RANK={rank}\0".encode()
    [pid] = [p for p in children(torchrun) if mine in Path(f"/proc/{p}/environ").read_bytes()]
    os.kill(pid, signal.SIGKILL)


def kill_node(torchrun: subprocess.Popen[str]) -> None:
    """By SIGKILL: the agent, so that it does nothing about its ranks, and then these."""
    mine = children(torchrun)
    torchrun.kill()
    for pid in mine:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def joined(lines: Iterator[str], count: int) -> tuple[int, int, int]:
    """Step and version at which so many ranks have joined, and how many by a full sync."""
    here = full = 0
    for line in lines:
        if match := JOINED.fullmatch(line):
            here, full = here + int(match[3]), full + int(match[4])
            if here == count:
                return int(match[1]), int(match[2]), full
    raise AssertionError("the trainer has ended")


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Ranks that torchrun restarts resume, and are sent nothing.",
)
def test_ranks_that_are_restarted_resume_and_are_sent_nothing(tmp_path: Path) -> None:
    recipe = ["--steps", "30", "--checkpoint", str(tmp_path / "checkpoint")]
    recipe += ["--port", str(free_ports(4))]
    joinings, seen = [], [0]
    with ranks("--standalone", "--max-restarts", "1", recipe=recipe) as torchrun:
        for line in lines_of(torchrun):
            if match := JOINED.fullmatch(line):
                joinings.append([*map(int, match.group(1, 4, 5)), seen[-1]])
            elif match := SENT.fullmatch(line):
                seen.append(int(match[1]))
                if seen[-1] == 3 and len(joinings) == 1:
                    kill(torchrun, rank=2)
            seen += [-1] * len(HOLDS.findall(line))
        assert torchrun.wait(30) == 0
    (_, full, _, _), (resumed, full_again, payload, reached) = joinings
    assert (full, full_again, payload) == (3, 0, 0)
    assert reached - 1 <= resumed <= reached  # it was saved after it was sent
    assert seen[-4:] == [30, -1, -1, -1]


def two_nodes(
    stack: ExitStack, folder: Path, *, address: str, store: int, port: int, hosts: Sequence[Host]
) -> tuple[Iterator[str], subprocess.Popen[str], Callable[[], object]]:
    """A node that trains and one that follows: the first one's lines, the second, and it anew."""
    recipe = ["--trainers", "2", "--port", str(port), "--steps", "1000000", "--step-s", "0.1"]
    recipe += ["--checkpoint", str(folder / "checkpoint")]

    def node(number: int) -> subprocess.Popen[str]:
        options = ["--nnodes", "2", "--node-rank", str(number), "--max-restarts", "1"]
        options += ["--rdzv-endpoint", f"{address}:{store}"]
        here = ranks(*options, per_node=2, recipe=recipe, host=hosts[number])
        return stack.enter_context(here)

    first, second = node(0), node(1)
    return lines_of(first), second, lambda: node(1)


def check_a_node_that_comes_back(
    lines: Iterator[str], second: subprocess.Popen[str], again: Callable[[], object]
) -> None:
    """Kill the node that follows with its torchrun, and start it again."""
    assert joined(lines, 2) == (0, 1, 2)
    kill_node(second)
    next(line for line in lines if NOBODY.fullmatch(line))
    again()
    step, version, _ = joined(lines, 2)
    assert step > 1  # no rank that trains was restarted
    assert version > 1


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A node of torchrun that is killed and started again joins; the trainer goes on meanwhile.",
)
def test_a_node_that_follows_comes_back_and_the_trainer_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lines, second, again = two_nodes(
            stack,
            tmp_path,
            address="127.0.0.1",
            store=free_ports(1),
            port=free_ports(6),
            hosts=[(), ()],
        )
        check_a_node_that_comes_back(lines, second, again)


def test_without_a_secret_the_recipe_warns_and_lets_nobody_guess_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "0.0.0.0", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DELTASYNC_SECRET", raising=False)
    recipe = runpy.run_path(str(RECIPE))
    rank = recipe["Rank"](Namespace(trainers=1, port=free_ports(2), checkpoint=None))
    assert rank.secret is None
    with pytest.warns(UserWarning, match="is served without a secret"):
        rank.listen(0, "gloo").close()
