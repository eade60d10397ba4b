"""Actors that find each other by a `Rendezvous`, whoever of them is killed or added."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ray

from deltasync import SyncStats
from deltasync.errors import SyncAborted
from deltasync.integrations.ray import Rendezvous
from tests.ray.actors import Engine, Rank

RANKS = 2
PATIENCE_S = 200.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_environment: None) -> Iterator[None]:
    ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def meeting() -> Rendezvous:
    return Rendezvous(ranks=RANKS)


def trainer(meeting: Rendezvous) -> list[Any]:
    rank = ray.remote(Rank).options(num_cpus=0)
    return [rank.remote(meeting, number) for number in range(meeting.ranks)]


def engine(meeting: Rendezvous, **options: Any) -> Any:
    return ray.remote(Engine).options(num_cpus=0, **options).remote(meeting)


def send(ranks: Sequence[Any], **options: Any) -> SyncStats:
    """Raises what rank 0 raises."""
    calls = [rank.send.remote(**options) for rank in ranks]
    ray.wait(calls, num_returns=len(calls), timeout=PATIENCE_S)
    stats: SyncStats = ray.get(calls[0], timeout=PATIENCE_S)
    return stats


def send_until(ranks: Sequence[Any], is_done: Callable[[SyncStats], bool]) -> list[SyncStats]:
    """Sync again and again, as training does."""
    end, all_of_them = time.monotonic() + PATIENCE_S, list[SyncStats]()
    while not all_of_them or not is_done(all_of_them[-1]):
        assert time.monotonic() < end, all_of_them[-1]
        all_of_them.append(send(ranks))
        time.sleep(0.05)
    return all_of_them


def check(ranks: Sequence[Any], engines: Sequence[Any], version: int) -> None:
    """All hold the trainer's bits, as this version."""
    bits = ray.get(ranks[0].bits.remote())
    held = [e.held.options(max_task_retries=-1).remote() for e in engines]
    assert ray.get(held, timeout=PATIENCE_S) == [(version, bits)] * len(engines)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Actors that Ray restarts, or that are added, connect by themselves; engines serve while "
    "the trainer is away, and find the next one.",
)
def test_engines_are_killed_restarted_and_added(meeting: Rendezvous) -> None:
    engines = [engine(meeting, max_restarts=-1) for _ in range(3)]  # before the trainer is there
    ranks = trainer(meeting)
    assert send(ranks, wait_for=3).receivers == 3

    ray.kill(engines[0], no_restart=False)
    ray.kill(engines.pop())
    engines += [engine(meeting, max_restarts=-1) for _ in range(2)]  # in the same step
    done = send_until(ranks, lambda stats: stats.receivers == 4)
    assert sum(len(stats.lost) for stats in done) == 2
    assert sum(stats.joined for stats in done) == 3
    assert [stats.version for stats in done] == [*range(2, 2 + len(done))]  # none has failed
    check(ranks, engines, done[-1].version)

    process = ray.get(engines[1].pid.remote())
    under_way = [rank.send.remote() for rank in ranks]
    os.kill(process, signal.SIGKILL)
    ray.get(under_way)
    done = send_until(ranks, lambda stats: stats.receivers == 4)
    check(ranks, engines, done[-1].version)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Actors that Ray restarts, or that are added, connect by themselves; engines serve while "
    "the trainer is away, and find the next one.",
)
def test_engines_serve_while_the_trainer_is_away_and_find_the_next_one(meeting: Rendezvous) -> None:
    ranks, engines = trainer(meeting), [engine(meeting) for _ in range(2)]
    assert send(ranks, wait_for=2).version == 1
    held = ray.get([each.held.remote() for each in engines])
    processes = ray.get([each.pid.remote() for each in engines])

    os.kill(ray.get(ranks[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(SyncAborted, match="rank"):
        send(ranks, timeout_s=5)
    assert ray.get([each.held.remote() for each in engines]) == held
    ray.kill(ranks[0])
    assert ray.get([each.held.remote() for each in engines]) == held

    ranks = trainer(meeting)
    stats = send(ranks, wait_for=2)
    assert (stats.version, stats.joined) == (1, 2)
    check(ranks, engines, send(ranks).version)
    assert ray.get([each.pid.remote() for each in engines]) == processes
