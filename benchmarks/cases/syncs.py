"""Two processes: whole syncs through shared memory, digests and scrub included."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.cases.kernels import size_of
from benchmarks.pair import Model, Pair, Synced, open_pair
from benchmarks.record import PER_PARAMETER, SLOW_DOWN, Result, compared
from benchmarks.workload import Flip, Scale, num_elements
from deltasync import Policy, SenderOptions, SyncStats

SPARSE = SenderOptions()
DENSE = SenderOptions(policy=Policy(dense_above=0.0))
ALL_SPARSE = SenderOptions(policy=Policy(dense_above=1.0))
OVER_DIFF_GOALS = ((0.001, 1.5), (0.01, 2.2))  # (densities up to this, goal)
OVER_DENSE_GOAL = 1.1
PER_PARAMETER_GOAL_US = 10.0


def sync(scale: Scale) -> Iterator[Result]:
    """The default policy against its own diff, and against the same sync with all dense."""
    with open_pair(Model(hidden=scale.hidden, layers=scale.layers)) as pair:
        for density in scale.densities:
            flip = Flip(pair.module, density)
            sparse, dense = _take_turns(pair, flip, SPARSE, DENSE, rounds=scale.rounds)
            fields = size_of(pair.module, flip, density)
            yield compared(
                case="sync_over_diff",
                **fields,
                samples=[s.seconds for s in sparse],
                baseline="its diff with values and digests",
                baseline_samples=[s.stats.diff_s for s in sparse],
                ratio_is=SLOW_DOWN,
                goal=next((goal for most, goal in OVER_DIFF_GOALS if density <= most), None),
                bytes=sparse[0].stats.payload_bytes,
                parts=parts_of(sparse),
            )
            yield compared(
                case="sync_over_dense",
                **fields,
                samples=[s.seconds for s in sparse],
                baseline="the same sync, every chunk dense",
                baseline_samples=[s.seconds for s in dense],
                ratio_is=SLOW_DOWN,
                goal=OVER_DENSE_GOAL,
                bytes=sparse[0].stats.payload_bytes,
                bound_bytes=dense[0].stats.payload_bytes,
                parts=parts_of(dense),
            )
        pair.check()


def crossover(scale: Scale) -> Iterator[Result]:
    """Nothing dense against all dense: where the two meet is where the default policy belongs."""
    with open_pair(Model(hidden=scale.hidden, layers=scale.layers)) as pair:
        for density in scale.crossover:
            flip = Flip(pair.module, density)
            sparse, dense = _take_turns(pair, flip, ALL_SPARSE, DENSE, rounds=scale.rounds)
            yield compared(
                case="crossover",
                **size_of(pair.module, flip, density),
                samples=[s.seconds for s in sparse],
                baseline="the same sync, every chunk dense",
                baseline_samples=[s.seconds for s in dense],
                ratio_is=SLOW_DOWN,
                goal=None,
                bytes=sparse[0].stats.payload_bytes,
                bound_bytes=dense[0].stats.payload_bytes,
                parts=parts_of(sparse),
            )


def small(scale: Scale) -> Iterator[Result]:
    """A model of many small parameters of which one element changes: what each one costs."""
    with open_pair(Model(num_small=scale.num_small)) as pair:
        numel = num_elements(pair.module)
        flip = Flip(pair.module, 0.0)
        flip.positions[0] = flip.positions[0].new_zeros(1)
        done = [_changed_sync(pair, flip, SPARSE) for _ in range(scale.rounds + 1)][1:]
        pair.check()
        for case, samples in (
            ("parameter_sync", [s.seconds for s in done]),
            ("parameter_sender", [s.sender_cpu_s for s in done]),
            ("parameter_receiver", [s.receiver_cpu_s for s in done]),
        ):
            cost_us = 1e6 * median(samples) / scale.num_small
            yield Result(
                case=case,
                **size_of(pair.module, flip, 1 / numel),
                seconds=median(samples),
                samples=tuple(samples),
                ratio=cost_us,
                ratio_is=PER_PARAMETER,
                goal=PER_PARAMETER_GOAL_US,
                met=cost_us <= PER_PARAMETER_GOAL_US,
                bytes=done[0].stats.payload_bytes,
                parts=parts_of(done),
            )


def parts_of(syncs: list[Synced]) -> dict[str, float]:
    """Medians of what SyncStats splits a sync into, and the CPU time of both ends."""
    return {
        "diff_s": median(s.stats.diff_s for s in syncs),
        "transfer_s": median(s.stats.transfer_s for s in syncs),
        "commit_s": median(s.stats.commit_s for s in syncs),
        "receiver_commit_s": median(s.stats.receiver_commit_s for s in syncs),
        "pause_s": median(pause_s(s.stats) for s in syncs),
        "sender_cpu_s": median(s.sender_cpu_s for s in syncs),
        "receiver_cpu_s": median(s.receiver_cpu_s for s in syncs),
    }


def pause_s(stats: SyncStats) -> float:
    """How long the engine does not serve: what is not staged is written as it arrives."""
    was_staged = stats.receiver_bytes > 0
    return stats.commit_s + (0.0 if was_staged else stats.transfer_s)


def _take_turns(
    pair: Pair, flip: Flip, first: SenderOptions, second: SenderOptions, *, rounds: int
) -> tuple[list[Synced], list[Synced]]:
    """Syncs of the same change with either options; the first of each is not counted."""
    done: tuple[list[Synced], list[Synced]] = ([], [])
    turns = [(done[0], first), (done[1], second)]
    for _ in range(rounds + 1):
        turns.reverse()
        for syncs, options in turns:
            syncs.append(_changed_sync(pair, flip, options))
    return done[0][1:], done[1][1:]


def _changed_sync(pair: Pair, flip: Flip, options: SenderOptions) -> Synced:
    flip.apply()
    return pair.sync(options)
