"""What listeners cost for each sync: CPU time of the thread that syncs, whatever else runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry

from benchmarks.record import PER_SYNC, Result
from benchmarks.workload import Scale
from deltasync import SyncStats
from deltasync.observe.metrics import Metrics
from deltasync.observe.run_log import RunLog
from deltasync.sync.events import ReceiveStats, SyncEvent

_CALLS = 500  # a sample
_NUMEL, _NNZ, _PARAMETERS = 1 << 30, 1 << 20, 300
GOAL_US = 20.0


def observing(scale: Scale) -> Iterator[Result]:
    """A delta to eight engines, with three codecs; and the same at a receiver."""
    sent, received = _sent(), _received()
    metrics = Metrics(CollectorRegistry())
    yield _timed("metrics_sender", metrics, sent, scale.rounds, GOAL_US)
    yield _timed("metrics_receiver", metrics, received, scale.rounds, GOAL_US)
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder) / "run.jsonl") as log:
        yield _timed("run_log", log, sent, scale.rounds, None)


def _timed(
    case: str,
    listener: Callable[[SyncEvent], None],
    event: SyncEvent,
    rounds: int,
    goal_us: float | None,
) -> Result:
    samples = [_seconds(listener, event) for _ in range(rounds + 1)][1:]
    cost_us = 1e6 * median(samples)
    return Result(
        case=case,
        numel=_NUMEL,
        parameters=_PARAMETERS,
        density=_NNZ / _NUMEL,
        changed=_NNZ,
        seconds=median(samples),
        samples=tuple(samples),
        ratio=cost_us,
        ratio_is=PER_SYNC,
        goal=goal_us,
        met=goal_us is None or cost_us <= goal_us,
    )


def _seconds(listener: Callable[[SyncEvent], None], event: SyncEvent) -> float:
    """CPU time of one call, on average."""
    began = time.thread_time()
    for _ in range(_CALLS):
        listener(event)
    return (time.thread_time() - began) / _CALLS


def _sent() -> SyncStats:
    return SyncStats(
        version=2,
        base_version=1,
        kind="delta",
        receivers=8,
        numel=_NUMEL,
        nnz=_NNZ,
        payload_bytes=6 * _NNZ,
        dense_bytes=2 * _NUMEL,
        diff_s=0.003,
        transfer_s=0.002,
        commit_s=0.001,
        receiver_commit_s=0.0009,
        total_s=0.006,
        sender_bytes=12 * _NNZ,
        receiver_bytes=6 * _NNZ,
        snapshot_bytes=2 * _NUMEL,
        bytes_by_codec={"table": 20_000, "gap+ulp": 2 * _NNZ, "raw": _NNZ},
        parameters={"changed": 290, "unchanged": 10, "frozen": 0},
        stream_id="0" * 32,
        engines=tuple(f"engine-{number}" for number in range(8)),
        ended_at=1.7e9,
        phases=(("compare", 0.0, 0.003), ("send", 0.003, 0.004), ("wait", 0.004, 0.005)),
    )


def _received() -> ReceiveStats:
    return ReceiveStats(
        name="engine-0[0/1]",
        stream_id="0" * 32,
        version=2,
        base_version=1,
        kind="delta",
        num_bytes=6 * _NNZ,
        staged_bytes=6 * _NNZ,
        stage_s=0.002,
        commit_s=0.0009,
        pause_s=0.001,
        total_s=0.005,
        ended_at=1.7e9,
    )
