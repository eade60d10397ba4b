"""One sender and many engine processes: syncs in turns with those of one engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import median

from benchmarks.cases.kernels import size_of
from benchmarks.cases.syncs import parts_of
from benchmarks.pair import Model, Pair, Synced, open_pair
from benchmarks.record import SLOW_DOWN, Result, compared
from benchmarks.workload import Flip, Scale

SENDER_GOAL, SYNC_GOAL = 1.05, 2.0
DENSITY = 0.01


def fleet(scale: Scale) -> Iterator[Result]:
    """The sender's CPU time, the whole sync, and how much of that is CPU time of all processes.

    Each engine is a process with one thread. With fewer cores than engines they take turns, so that
    the last of these is what no sender can avoid.
    """
    model = Model(hidden=scale.hidden, layers=scale.layers)
    with open_pair(model) as one, open_pair(model, num_engines=scale.num_engines) as many:
        flips = {pair: Flip(pair.module, DENSITY) for pair in (one, many)}
        done: dict[Pair, list[Synced]] = {one: [], many: []}
        for turn in range(scale.rounds + 1):
            for pair in (one, many) if turn % 2 else (many, one):
                flips[pair].apply()
                done[pair].append(pair.sync())
        one.check()
        many.check()
        fields = size_of(many.module, flips[many], DENSITY)
    alone, together = done[one][1:], done[many][1:]
    whole, least = [s.seconds for s in together], [_least_s(s) for s in together]
    cpu, cpu_alone = [s.sender_cpu_s for s in together], [s.sender_cpu_s for s in alone]
    one_engine = "the same with one engine"
    for case, goal, samples, baseline, baseline_samples in (
        ("fleet_sender", SENDER_GOAL, cpu, one_engine, cpu_alone),
        ("fleet_sync", SYNC_GOAL, whole, one_engine, [s.seconds for s in alone]),
        ("fleet_cores", None, whole, "CPU time of all processes, by number of cores", least),
    ):
        yield compared(
            case=case,
            **fields,
            samples=samples,
            baseline=baseline,
            baseline_samples=baseline_samples,
            ratio_is=SLOW_DOWN,
            goal=goal,
            bytes=together[0].stats.payload_bytes,
            bound_bytes=alone[0].stats.payload_bytes,
            parts=parts_of(together) | {"receivers_cpu_s": median(map(_receivers_cpu_s, together))},
        )


def _receivers_cpu_s(sync: Synced) -> float:
    return sum(sync.receivers_cpu_s)


def _least_s(sync: Synced) -> float:
    """What the sync takes if no core ever waits."""
    return (sync.sender_cpu_s + _receivers_cpu_s(sync)) / len(os.sched_getaffinity(0))
