"""The groups of cases. All ranks run a group together; the first rank's records are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from math import prod
from statistics import median
from typing import Any

import torch

from benchmarks.record import GOAL_NUMEL, MEMORY, SLOW_DOWN, SPEED_UP, RatioIs, Result, compared
from benchmarks.syncs import shards
from benchmarks.syncs.ends import End, joined
from benchmarks.syncs.group import Group, synchronize
from deltasync import SenderOptions, SyncStats
from deltasync.delta.tiles import CHUNK

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
_ADAMW_STEPS = 6
_OF_A_CHUNK = 24 * CHUNK  # bytes on a CPU: mask, int32 and int64 positions, old and new
_COPIED_NUMEL = 2 << 30
_SHARDED_GOALS = {"dense": 5.0, "gathered": 2.0}
_SHARDED_DENSITY, _PAUSE_S = 0.01, 0.002  # at which goals count, and the goal of the pause
_LARGE_DENSITY, _LARGE_S, _LARGE_PAUSE_S = 0.003, 0.030, 0.003  # of a mixture of 30 B
_SHARDED_WAYS = {
    "dense": "all-gather, {how}, copied into each engine rank's part",
    "gathered": "nonzero a parameter, gathered to rank 0, {how}, NaN-masked load_weights",
}
_seeds = count(1)


def sync(group: Group) -> Iterator[Result]:
    """Whole syncs and their phases, against everything dense and against sparse as usual."""
    is_broadcast = group.plan.link == "collective"
    with joined(group, is_sparse=True) as end:
        for density in group.plan.sizes.densities:
            change = changes(end, density)
            ours = syncs(end, change)
            dense = _baseline(end, end.dense, change)
            end.dense()
            end.rebase()
            usual = _baseline(end, end.sparse, change)
            end.check(baseline=True)
            if group.rank == 0:
                how = "two broadcasts" if is_broadcast else "two copies"
                yield _over_dense("sync_over_dense", end, ours, dense, density)
                yield record(
                    "sync_over_usual",
                    end,
                    ours,
                    usual,
                    density,
                    ratio_is=SPEED_UP,
                    baseline=f"nonzero and {how} a parameter, NaN-masked load_weights",
                )
        change()
        end.sync()
        end.check()


def diff(group: Group) -> Iterator[Result]:
    """Finding what has changed, as syncs report it, against copying what it is compared with."""
    device, density = group.device, group.plan.sizes.density
    cases = {"diff": ("a copy of the model, device to device", device)}
    if device.type == "cuda":
        host = torch.device("cpu")
        text = "the snapshot's copy from pinned memory to the GPU"
        cases["diff_host_snapshot"] = (text, host)
    for case, (baseline, where) in cases.items():
        options = None if where == device else SenderOptions(snapshot_device="cpu")
        with joined(group, options) as end:
            ours = syncs(end, changes(end, density))
            if group.rank == 0:
                found = [one.diff_s for one in end.stats[-len(ours) :]]
                copied = _copied(group, where)
                yield record(case, end, found, copied, density, baseline=baseline)
            end.check()


def _copied(group: Group, source: torch.device) -> list[float]:
    """Seconds that a copy of the model to the rank's device takes, at the rate of a part of it."""
    whole = group.plan.model.numel
    numel = min(_COPIED_NUMEL, whole)
    is_pinned = source.type == "cpu" and group.device.type == "cuda"
    held = torch.zeros(numel, dtype=torch.bfloat16, device=source, pin_memory=is_pinned)
    room = torch.empty_like(held, device=group.device, pin_memory=False)
    samples = []
    for _ in range(group.plan.sizes.rounds + 1):
        synchronize(group.device)
        began = time.perf_counter()
        room.copy_(held, non_blocking=True)
        synchronize(group.device)
        samples.append((time.perf_counter() - began) * whole / numel)
    return samples[1:]


def moe(group: Group) -> Iterator[Result]:
    """As many bytes in 60 and in 220 times as many parameters: what Python and launches cost."""
    few, *_ = models = group.plan.sizes.moe
    density, first = group.plan.sizes.density, list[float]()
    for case, geometry in zip(("", "moe_sync", "moe_sync_most"), models, strict=True):
        with joined(group, geometry=geometry) as end:
            ours = syncs(end, changes(end, density))
            end.check()
            first = first or ours
            if group.rank == 0 and case:
                baseline = f"{few}, as many bytes in fewer parameters"
                yield record(case, end, ours, first, density, baseline=baseline)


def quant(group: Group) -> Iterator[Result]:
    """Whole syncs to engines that serve block FP8, beside those to bfloat16."""
    density, first = group.plan.sizes.density, list[float]()
    for form in ("", "block FP8"):
        with joined(group, form=form) as end:
            ours = syncs(end, changes(end, density))
            end.check()
            first = first or ours
            if group.rank == 0 and form:
                yield record(
                    "quant_sync",
                    end,
                    ours,
                    first,
                    density,
                    ratio_is=SPEED_UP,
                    baseline="the same changes to an engine that serves bfloat16",
                )


def receivers(group: Group) -> Iterator[Result]:
    """Whole syncs to one engine and to several, each a process."""
    density, first, most = group.plan.sizes.density, list[float](), group.plan.engines
    for number in group.plan.sizes.receivers:
        if number > most:
            return
        with joined(group, engines=number) as end:
            ours = syncs(end, changes(end, density))
            if number == most:  # a broadcast needs all of them
                end.check()
            first = first or ours
            if group.rank == 0 and number > 1:
                baseline = "the same to one engine"
                yield record(f"receivers_{number}", end, ours, first, density, baseline=baseline)


def memory(group: Group) -> Iterator[Result]:
    """The most memory that a sync takes at both ends, against the design's bounds."""
    plan = group.plan
    bucket_bytes = plan.sizes.bucket_bytes
    weights, chunk = 2 * plan.model.numel, _OF_A_CHUNK * plan.is_host
    masks = 0 if plan.is_host else plan.model.numel // 8
    bounds = {
        "sender": masks + weights // 20 + 2 * bucket_bytes + chunk,
        "receiver": max(64 << 20, weights // 4) + 2 * bucket_bytes + chunk,
    }
    with joined(group, SenderOptions(bucket_bytes=bucket_bytes)) as end:
        for density in plan.sizes.memory:
            changes(end, density)()
            end.watch()
            took = timed(end.group, end.sync)
            found = dict(zip(bounds, group.told(end.taken()), strict=False))
            for what, num_bytes in found.items() if group.rank == 0 else ():
                result = record(f"memory_{what}", end, [took], (), density)
                yield replace(
                    result,
                    ratio=num_bytes / bounds[what],
                    ratio_is=MEMORY,
                    met=result.goal is None or num_bytes <= bounds[what],
                    bytes=num_bytes,
                    bound_bytes=bounds[what],
                )
        end.check()


def adamw(group: Group) -> Iterator[Result]:
    """Syncs after real AdamW steps, whose density is what it is."""
    with joined(group) as end:
        syncs(end, changes(end, group.plan.sizes.density))
        end.begin_training()
        ours = rounds(end, end.sync, end.train, _ADAMW_STEPS, warm_ups=0)
        stats = end.stats[-len(ours) :]
        dense = _baseline(end, end.dense, end.train)
        end.sync()
        end.check()
        if group.rank == 0:
            density = median(one.density for one in stats)
            yield _over_dense("adamw", end, ours, dense, density, stats)


def large(group: Group) -> Iterator[Result]:
    """A model of which source and snapshot fill one device."""
    geometry, density = group.plan.sizes.large, group.plan.sizes.density
    if not geometry or group.plan.link == "local":
        return
    with joined(group, geometry=geometry) as end:
        change = changes(end, density)
        ours = syncs(end, change)
        dense = _baseline(end, end.dense, change)
        if group.rank == 0:
            yield _over_dense("large_over_dense", end, ours, dense, density)


def sharded(group: Group) -> Iterator[Result]:
    """Trainers and engines of several ranks; the other ways bring the same changes by turns."""
    make = shards.Trainer if group.is_trainer else shards.Engine
    with closing(make(group)) as end:
        for density in group.plan.sizes.densities:
            yield from _sharded(end, "sharded", changes(end, density), density)
        if group.plan.gathers:
            end.begin_training()
            yield from _sharded(end, "sharded_adamw", end.train, None)
        group.meet()


def _sharded(
    end: End, case: str, change: Callable[[], None], density: float | None
) -> Iterator[Result]:
    plan = end.group.plan
    ways = {"ours": end.sync}
    if plan.gathers:
        ways |= {"dense": end.dense, "gathered": end.sparse}
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, plan.sizes.rounds):  # the first does not count
        change()
        for way, work in ways.items():
            took = timed(end.group, work, until_all=True)
            if number >= 0:
                samples[way].append(took)
    end.check()
    if end.group.rank:
        return
    stats = end.stats[-plan.sizes.rounds :]
    found = median(one.density for one in stats) if density is None else density
    judged = (None, _SHARDED_DENSITY) if plan.gathers else (_LARGE_DENSITY,)
    is_judged = plan.device_type == "cuda" and density in judged
    is_judged &= plan.gathers or plan.is_large
    fields = sizes_of(end, stats, found) | {"parts": parts_of(stats)}
    how = "shared with engine ranks" if plan.link == "local" else "broadcast"
    for way, text in _SHARDED_WAYS.items() if plan.gathers else ():
        yield compared(
            case=f"{case}_over_{way}",
            samples=samples["ours"],
            baseline_samples=samples[way],
            baseline=text.format(how=how),
            ratio_is=SPEED_UP,
            goal=_SHARDED_GOALS[way] if is_judged and density is not None else None,
            **fields,
        )
    pauses = [pause_s(one) for one in stats]
    limits = {"pause": (pauses, _PAUSE_S)}
    if not plan.gathers:
        limits = {"large": (samples["ours"], _LARGE_S), "large_pause": (pauses, _LARGE_PAUSE_S)}
    for what, (taken, most) in limits.items():
        yield compared(
            case=f"{case}_{what}",
            samples=taken,
            baseline_samples=[most] * len(taken),
            baseline=f"{1000 * most:g} ms",
            ratio_is=SLOW_DOWN,
            goal=1.0 if is_judged else None,
            **fields,
        )


def changes(end: End, density: float) -> Callable[[], None]:
    """A function that makes a fresh change of that density."""
    return lambda: end.change(density, next(_seeds))


def syncs(end: End, change: Callable[[], None]) -> list[float]:
    """Seconds of whole syncs, after those that do not count."""
    sizes = end.group.plan.sizes
    return rounds(end, end.sync, change, sizes.rounds, warm_ups=sizes.warm_ups)


def _baseline(end: End, run: Callable[[], None], change: Callable[[], None]) -> list[float]:
    number = end.group.plan.sizes.baseline_rounds
    return rounds(end, run, change, number, warm_ups=1, until_all=True)


def rounds(
    end: End,
    run: Callable[[], None],
    before: Callable[[], None],
    number: int,
    *,
    warm_ups: int,
    until_all: bool = False,
) -> list[float]:
    """Seconds of each run but the first."""
    samples = []
    for _ in range(warm_ups + number):
        before()
        samples.append(timed(end.group, run, until_all=until_all))
    return samples[warm_ups:]


def timed(group: Group, run: Callable[[], None], *, until_all: bool = False) -> float:
    """Seconds of this rank's part, or until all ranks are done with theirs."""
    group.meet()
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    group.meet()
    return time.perf_counter() - began if until_all else seconds


def record(
    case: str,
    end: End,
    samples: Sequence[float],
    baseline_samples: Sequence[float],
    density: float,
    *,
    ratio_is: RatioIs = SLOW_DOWN,
    stats: Sequence[SyncStats] = (),
    **fields: Any,
) -> Result:
    """A record of medians, with what the last syncs report, or `stats`."""
    plan = end.group.plan
    stats = stats or end.stats[-len(samples) :]
    fields = sizes_of(end, stats, density) | {"parts": parts_of(stats)} | fields
    seconds, other = median(samples), median(baseline_samples or samples)
    ratio = other / seconds if ratio_is == SPEED_UP else seconds / other
    up_to, goal = GOALS.get(case, (0.0, None))
    is_tried = plan.device_type == "cpu" and not plan.is_host
    if is_tried or fields["numel"] < GOAL_NUMEL or density > up_to:
        goal = None
    return Result(
        case=case,
        seconds=seconds,
        samples=tuple(samples),
        baseline_seconds=other if baseline_samples else 0.0,
        baseline_samples=tuple(baseline_samples),
        ratio=ratio,
        ratio_is=ratio_is,
        goal=goal,
        met=goal is None or (ratio >= goal if ratio_is == SPEED_UP else ratio <= goal),
        **fields,
    )


def _over_dense(
    case: str,
    end: End,
    ours: Sequence[float],
    dense: Sequence[float],
    density: float,
    stats: Sequence[SyncStats] = (),
) -> Result:
    is_broadcast = end.group.plan.link == "collective"
    how = "broadcast" if is_broadcast else "copied through shared memory"
    return record(
        case,
        end,
        ours,
        dense,
        density,
        ratio_is=SPEED_UP,
        stats=stats,
        baseline=f"all weights packed, {how}, copied into parameters",
        bound_bytes=2 * end.group.plan.model.numel,
    )


def parts_of(stats: Sequence[SyncStats]) -> dict[str, float]:
    """Medians of what SyncStats splits a sync into, and of the pause."""
    parts = {f"{p}_s": median(getattr(s, f"{p}_s") for s in stats) for p in _PHASES}
    return parts | {"pause_s": median(map(pause_s, stats))}


def pause_s(stats: SyncStats) -> float:
    """How long the engine does not serve: what is not staged is written as it arrives."""
    was_staged = stats.receiver_bytes > 0
    return stats.commit_s + (0.0 if was_staged else stats.transfer_s)


def sizes_of(end: End, stats: Sequence[SyncStats], density: float) -> dict[str, Any]:
    """Fields of a record: of the model, and medians of what syncs changed and sent."""
    plan = end.group.plan
    shapes = plan.model.shapes()
    return {
        "numel": sum(map(prod, shapes.values())),
        "parameters": len(shapes),
        "density": density,
        "changed": round(median(one.nnz for one in stats)),
        "bytes": round(median(one.payload_bytes for one in stats)),
        "model": plan.geometry,
        "link": plan.where,
    }
