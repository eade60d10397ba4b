"""Where dense chunks begin to pay on this machine: syncs with nothing and with all dense."""

from __future__ import annotations

from itertools import count
from statistics import linear_regression, median

from benchmarks.gpu.pair import Pair, Synced, open_engine, open_pair, rounds
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.workload import mutate
from benchmarks.record import Environment
from deltasync import Costs, Policy, SenderOptions

SPARSE = SenderOptions(policy=Policy(dense_above=1.0))
DENSE = SenderOptions(policy=Policy(dense_above=0.0))
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
_ROUNDS, _WARM_UPS, _CASE_S = 5, 1, 6.0


def calibrate(setup: Setup) -> Costs:
    """Measure whole syncs of `setup`'s model and fit their costs. Raises RuntimeError.

    Sparse syncs take `a + sparse_ns * nnz`; `a` is what a sync costs whatever it sends. Dense
    ones take `a + dense_ns * numel`. So the two meet where `Costs.crossover` says.
    """
    seeds = count(1)
    changed: list[float] = []
    sparse_s: list[float] = []
    dense_s: list[float] = []
    with open_engine(setup) as engine, open_pair(engine, setup.geometry) as pair:
        for density in DENSITIES:
            for done in _syncs(pair, SPARSE, density, seeds):
                changed.append(done.stats.nnz)
                sparse_s.append(done.seconds)
            dense_s += [done.seconds for done in _syncs(pair, DENSE, density, seeds)]
        numel = pair.numel
    return fit(changed, sparse_s, median(dense_s), numel, machine=_machine(setup))


def fit(
    changed: list[float], sparse_s: list[float], dense_s: float, numel: int, *, machine: str
) -> Costs:
    """The costs of a line through (changed, sparse_s) and of a dense sync of `numel` elements.

    Raises RuntimeError if the times make no sense.
    """
    slope, base_s = linear_regression(changed, sparse_s)
    dense = (dense_s - base_s) / numel
    if slope <= 0 or dense <= 0:
        raise RuntimeError(
            f"a sparse element costs {1e9 * slope:.3g} ns and a dense one {1e9 * dense:.3g} ns: "
            "the machine is too busy, or the model too small"
        )
    return Costs(machine=machine, sparse_ns=1e9 * slope, dense_ns=1e9 * dense)


def _syncs(pair: Pair, options: SenderOptions, density: float, seeds: count[int]) -> list[Synced]:
    return list(
        rounds(
            lambda: pair.sync(options),
            lambda: mutate(pair.module, density, next(seeds)),
            count=_ROUNDS,
            warm_ups=_WARM_UPS,
            limit_s=_CASE_S,
        )
    )


def _machine(setup: Setup) -> str:
    here = Environment.here()
    is_cpu = setup.device_type == "cpu"
    hardware = f"{here.cpu}, {here.cores} cores" if is_cpu else here.gpu
    return f"{hardware}, {setup.transport}, torch {here.torch}"
