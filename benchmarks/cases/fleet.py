"""One sender and many engine processes: syncs against those of one engine, in turns."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases.kernels import size_of
from benchmarks.cases.syncs import parts_of
from benchmarks.pair import Model, Pair, Synced, open_pair
from benchmarks.record import SLOW_DOWN, Result, compared
from benchmarks.workload import Flip, Scale

SENDER_GOAL, SYNC_GOAL = 1.05, 2.0
DENSITY = 0.01


def fleet(scale: Scale) -> Iterator[Result]:
    """The sender's CPU time, and the whole sync: each engine is a process with a thread.

    On a machine with fewer cores than engines, the whole sync is the time that they take in turns.
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
    for case, goal, samples, baseline in (
        (
            "fleet_sender",
            SENDER_GOAL,
            [s.sender_cpu_s for s in together],
            [s.sender_cpu_s for s in alone],
        ),
        ("fleet_sync", SYNC_GOAL, [s.seconds for s in together], [s.seconds for s in alone]),
    ):
        yield compared(
            case=case,
            **fields,
            samples=samples,
            baseline="the same with one engine",
            baseline_samples=baseline,
            ratio_is=SLOW_DOWN,
            goal=goal,
            bytes=together[0].stats.payload_bytes,
            bound_bytes=alone[0].stats.payload_bytes,
            parts=parts_of(together),
        )
