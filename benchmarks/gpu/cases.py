"""The groups of cases that need both ends. A group is a function from a run to records."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from statistics import median
from typing import Any, TypeVar

from benchmarks.gpu.engine import FAILURES
from benchmarks.gpu.pair import (
    SPARSE_BYTES,
    EngineProcess,
    Pair,
    Synced,
    Transferred,
    open_engine,
    open_pair,
    rounds,
)
from benchmarks.gpu.setup import SCALES, Scale, Setup
from benchmarks.gpu.workload import Training, mutate
from benchmarks.record import GOAL_NUMEL, MEMORY, SLOW_DOWN, SPEED_UP, RatioIs, Result
from deltasync import SenderOptions, SyncStats
from deltasync.delta.patch import CHUNK_NUMEL

GOALS = {  # (most density that it counts for, goal)
    "sync_over_dense": (0.003, 2.7),
    "sync_over_usual": (0.003, 20.0),
    "moe_sync": (1.0, 1.3),
    "moe_sync_most": (1.0, 1.6),
    "diff": (0.003, 1.5),
    "quant_sync": (0.003, 1.0),
    "memory_sender": (1.0, 1.0),
    "memory_receiver": (1.0, 1.0),
    "large_over_dense": (0.01, 2.5),
    "receivers_16": (1.0, 2.0),
}
_PHASES = ("diff", "transfer", "commit", "receiver_commit")
_TYPICAL_DENSITY = 0.003
_ADAMW_STEPS = 6
_OF_A_CHUNK = 24 * CHUNK_NUMEL  # bytes on a CPU: mask, int32 and int64 positions, old and new

T = TypeVar("T")


@dataclass(slots=True)
class Run:
    """What a group needs. `failed` becomes true once something was left out."""

    setup: Setup
    open_engine: Callable[[], EngineProcess]
    failed: bool = False
    _seeds: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def scale(self) -> Scale:
        return SCALES[self.setup.scale]

    @property
    def engine(self) -> EngineProcess:
        return self.open_engine()

    def attempt(self, what: str, work: Callable[[], T]) -> T | None:
        """Do it; if it fails, say so on stderr and go on without."""
        try:
            return work()
        except FAILURES:
            traceback.print_exc()
            print(f"{what} failed and is left out", file=sys.stderr, flush=True)
            self.failed = True
            return None

    def changes(self, pair: Pair, density: float) -> Callable[[], None]:
        """A function that makes a fresh change of that density."""
        return lambda: mutate(pair.module, density, next(self._seeds))

    def syncs(self, pair: Pair, change: Callable[[], None]) -> list[Synced]:
        scale = self.scale
        return list(
            rounds(
                pair.sync, change, count=scale.rounds, warm_ups=scale.warm_ups, limit_s=scale.case_s
            )
        )

    def baseline(
        self, run: Callable[[], Transferred], change: Callable[[], None]
    ) -> list[Transferred]:
        scale = self.scale
        number = scale.baseline_rounds
        return list(rounds(run, change, count=number, warm_ups=1, limit_s=scale.case_s))

    def record(
        self,
        case: str,
        samples: Sequence[float],
        baseline_samples: Sequence[float] = (),
        *,
        ratio_is: RatioIs = SLOW_DOWN,
        **fields: Any,
    ) -> Result:
        """A record of medians. Goals are for models where they belong."""
        seconds, other = median(samples), median(baseline_samples or samples)
        ratio = other / seconds if ratio_is == SPEED_UP else seconds / other
        up_to, goal = GOALS.get(case, (0.0, None))
        is_tried = self.setup.device_type == "cpu" and not self.setup.is_host
        is_toy = is_tried or fields["numel"] < GOAL_NUMEL
        if is_toy or fields["density"] > up_to:
            goal = None
        met = goal is None or (ratio >= goal if ratio_is == SPEED_UP else ratio <= goal)
        fields = {"model": self.setup.geometry, "link": self.setup.transport} | fields
        return Result(
            case=case,
            seconds=seconds,
            samples=tuple(samples),
            baseline_seconds=other if baseline_samples else 0.0,
            baseline_samples=tuple(baseline_samples),
            ratio=ratio,
            ratio_is=ratio_is,
            goal=goal,
            met=met,
            **fields,
        )


def sync(run: Run) -> Iterator[Result]:
    """Whole syncs and their phases, against everything dense and against sparse as usual."""
    with open_pair(run.engine, run.setup.geometry, shared_bytes=SPARSE_BYTES) as pair:
        ready = run.attempt("the dense baseline", pair.start_baselines)
        for density in run.scale.densities:
            change = run.changes(pair, density)
            ours = run.syncs(pair, change)
            if not ready:
                continue
            dense = run.attempt("dense", partial(run.baseline, pair.dense, change))
            if dense:
                yield _over_dense(run, "sync_over_dense", pair, ours, dense, density)
            usual = run.attempt("usual sparse", partial(_usual, run, pair, change))
            if usual:
                yield _over_usual(run, pair, ours, usual, density)
            ready = bool(dense and usual)
        change()
        pair.sync()
        pair.check()


def _usual(run: Run, pair: Pair, change: Callable[[], None]) -> list[Transferred]:
    done = run.baseline(pair.usual_sparse, change)
    pair.check(baseline=True)
    return done


def _over_dense(
    run: Run,
    case: str,
    pair: Pair,
    ours: list[Synced],
    dense: list[Transferred],
    density: float,
) -> Result:
    how = "broadcast" if run.setup.link == "collective" else "copied through shared memory"
    return run.record(
        case,
        [s.seconds for s in ours],
        [d.seconds for d in dense],
        ratio_is=SPEED_UP,
        baseline=f"all weights packed, {how}, copied into parameters",
        bound_bytes=pair.weights_bytes,
        parts=parts_of([s.stats for s in ours]),
        **sizes_of(pair, ours, density),
    )


def _over_usual(
    run: Run, pair: Pair, ours: list[Synced], usual: list[Transferred], density: float
) -> Result:
    how = "two broadcasts" if run.setup.link == "collective" else "two copies"
    return run.record(
        "sync_over_usual",
        [s.seconds for s in ours],
        [u.seconds for u in usual],
        ratio_is=SPEED_UP,
        baseline=f"nonzero and {how} a parameter, NaN-masked load_weights",
        parts={key: median(u.parts[key] for u in usual) for key in usual[0].parts},
        **sizes_of(pair, ours, density),
    )


def moe(run: Run) -> Iterator[Result]:
    """As many bytes in 60 and in 220 times as many parameters: what Python and launches cost."""
    done: dict[str, list[Synced]] = {}
    few, *others = run.scale.moe
    density = run.scale.moe_density
    for geometry in run.scale.moe:
        with open_pair(run.engine, geometry) as pair:
            mine = done[geometry] = run.syncs(pair, run.changes(pair, density))
            pair.check()
            sizes = sizes_of(pair, mine, density) | {"model": geometry}
        if geometry in others:
            yield run.record(
                ("moe_sync", "moe_sync_most")[others.index(geometry)],
                [s.seconds for s in mine],
                [s.seconds for s in done[few]],
                baseline=f"{few}, as many bytes in fewer parameters",
                parts=parts_of([s.stats for s in mine]),
                **sizes,
            )


def receivers(run: Run) -> Iterator[Result]:
    """Whole syncs to one engine and to several, each a process."""
    density, done = run.scale.moe_density, list[list[Synced]]()
    for number in run.scale.receivers:
        if number > run.setup.most_engines:
            return
        with ExitStack() as stack:
            others = [
                stack.enter_context(open_engine(replace(run.setup, engine=other)))
                for other in range(2, number + 1)
            ]
            with open_pair(run.engine, run.setup.geometry, others=others) as pair:
                done.append(run.syncs(pair, run.changes(pair, density)))
                pair.check()
                sizes = sizes_of(pair, done[-1], density)
        if number > 1:
            yield run.record(
                f"receivers_{number}",
                [s.seconds for s in done[-1]],
                [s.seconds for s in done[0]],
                baseline="the same to one engine",
                parts=parts_of([s.stats for s in done[-1]]),
                **sizes,
            )


def memory(run: Run) -> Iterator[Result]:
    """The most memory that a sync takes at both ends, against the design's bounds."""
    bucket_bytes = run.scale.bucket_bytes
    with open_pair(
        run.engine, run.setup.geometry, SenderOptions(bucket_bytes=bucket_bytes)
    ) as pair:
        weights, chunk = pair.weights_bytes, _OF_A_CHUNK * run.setup.is_host
        masks = 0 if run.setup.is_host else pair.numel // 8
        bounds = {
            "sender": masks + weights // 20 + 2 * bucket_bytes + chunk,
            "receiver": max(64 << 20, weights // 4) + 2 * bucket_bytes + chunk,
        }
        for density in run.scale.memory:
            run.changes(pair, density)()
            pair.watch()
            done = pair.sync()
            for end, num_bytes in pair.taken().items():
                yield _memory(run, f"memory_{end}", pair, done, density, num_bytes, bounds[end])
        pair.check()


def _memory(
    run: Run, case: str, pair: Pair, done: Synced, density: float, num_bytes: int, bound: int
) -> Result:
    result = run.record(case, [done.seconds], **sizes_of(pair, [done], density))
    return replace(
        result,
        ratio=num_bytes / bound,
        ratio_is=MEMORY,
        met=result.goal is None or num_bytes <= bound,
        bytes=num_bytes,
        bound_bytes=bound,
    )


def adamw(run: Run) -> Iterator[Result]:
    """Syncs after real AdamW steps, whose density is what it is."""
    with open_pair(run.engine, run.setup.geometry) as pair:
        run.syncs(pair, run.changes(pair, _TYPICAL_DENSITY))
        training = Training(pair.module)
        ours = list(rounds(pair.sync, training.step, count=_ADAMW_STEPS, warm_ups=0, limit_s=60.0))
        dense = run.baseline(pair.dense, training.step)
        pair.sync()
        pair.check()
        density = median(s.stats.density for s in ours)
        yield _over_dense(run, "adamw", pair, ours, dense, density)


def large(run: Run) -> Iterator[Result]:
    """A model of which source and snapshot fill one device."""
    geometry = run.scale.large
    if geometry is None or run.setup.link == "local":
        return
    with open_pair(run.engine, geometry) as pair:
        change = run.changes(pair, _TYPICAL_DENSITY)
        ours = run.syncs(pair, change)
        dense = run.attempt("dense", lambda: run.baseline(pair.dense, change))
        yield run.record(
            "large_over_dense" if dense else "large",
            [s.seconds for s in ours],
            [d.seconds for d in dense or ()],
            ratio_is=SPEED_UP,
            baseline="all weights packed, broadcast, copied into parameters" if dense else "",
            parts=parts_of([s.stats for s in ours]),
            **sizes_of(pair, ours, _TYPICAL_DENSITY),
            model=geometry,
        )


def parts_of(stats: Sequence[SyncStats]) -> dict[str, float]:
    """Medians of what SyncStats splits a sync into, and of the pause."""
    parts = {f"{p}_s": median(getattr(s, f"{p}_s") for s in stats) for p in _PHASES}
    return parts | {"pause_s": median(map(pause_s, stats))}


def pause_s(stats: SyncStats) -> float:
    """How long the engine does not serve: what is not staged is written as it arrives."""
    was_staged = stats.receiver_bytes > 0
    return stats.commit_s + (0.0 if was_staged else stats.transfer_s)


def sizes_of(pair: Pair, syncs: list[Synced], density: float) -> dict[str, Any]:
    """Fields of a record: of the model, and medians of what syncs changed and sent."""
    return {
        "numel": pair.numel,
        "parameters": pair.num_parameters,
        "density": density,
        "changed": round(median(s.stats.nnz for s in syncs)),
        "bytes": round(median(s.stats.payload_bytes for s in syncs)),
    }
