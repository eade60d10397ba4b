"""A thousand engines that fail, stall and come back, step after step.

Each step ends with one sync, to the engines that are there. An engine that fails is gone until it
has restarted. An engine that stalls holds up the sync for the straggler's timeout, is dropped from
the version, and catches up with the next one. An engine that comes back needs all weights: from
the trainer, which sends them within the next sync, or from a store, which the trainer does not
notice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated. Times in seconds.

    Attributes:
        engines: Their number.
        step_s: From one optimizer step to the next, without the sync.
        sync_s: Of a sync in which nothing goes wrong.
        fails_every_s: Mean time between failures of one engine.
        restart_s: From a failure until the engine asks for weights.
        stall: Probability that an engine stalls in a sync.
        timeout_s: After which a stalled engine is dropped.
        full_s: To bring all weights to those that need them: one broadcast, or one fetch.
        has_store: Whether they come from a store.
    """

    engines: int = 1000
    step_s: float = 60.0
    sync_s: float = 0.5
    fails_every_s: float = 24 * 3600.0
    restart_s: float = 300.0
    stall: float = 1e-5
    timeout_s: float = 5.0
    full_s: float = 20.0
    has_store: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of steps came to.

    Attributes:
        sync_s: Mean time that the trainer spends in a sync, seconds.
        worst_s: The 99th percentile.
        serving: Share of all engines that serve the newest version after a sync, on average.
        behind: Share that serve an older one.
        failures: Engines that failed, in all.
    """

    sync_s: float
    worst_s: float
    serving: float
    behind: float
    failures: int


def simulate(fleet: Fleet, *, steps: int = 2000, seed: int = 0) -> Outcome:
    """Run so many steps. The same seed gives the same outcome."""
    rng = np.random.default_rng(seed)
    now, failures = 0.0, 0
    back_at = np.zeros(fleet.engines)  # when each has restarted; 0 for those that are there
    needs_all = np.zeros(fleet.engines, bool)
    times, current, old = [], 0.0, 0.0
    for _ in range(steps):
        now += fleet.step_s
        fails = (back_at == 0) & (rng.random(fleet.engines) < fleet.step_s / fleet.fails_every_s)
        back_at[fails], needs_all[fails] = now + fleet.restart_s, True
        failures += int(fails.sum())
        wait = fleet.full_s if fleet.has_store else 0.0
        returns = (back_at > 0) & (back_at + wait <= now)
        back_at[returns] = 0
        there = back_at == 0
        stalls = there & (rng.random(fleet.engines) < fleet.stall)
        seconds = fleet.sync_s + (fleet.timeout_s if stalls.any() else 0.0)
        if not fleet.has_store and needs_all[there].any():
            seconds += fleet.full_s
        needs_all[there] = False
        times.append(seconds)
        now += seconds
        current += float((there & ~stalls).sum())
        old += float(stalls.sum())
    whole = steps * fleet.engines
    return Outcome(
        float(np.mean(times)),
        float(np.percentile(times, 99)),
        current / whole,
        old / whole,
        failures,
    )


def with_and_without_store(fleet: Fleet, *, seed: int = 0) -> tuple[Outcome, Outcome]:
    """(all weights from the trainer, from a store)."""
    return (
        simulate(replace(fleet, has_store=False), seed=seed),
        simulate(replace(fleet, has_store=True), seed=seed),
    )
