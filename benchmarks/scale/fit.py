"""Costs from records: least squares of relative errors, without negative costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import RESULTS, Result, read_records
from benchmarks.scale.model import DENSE_BYTES, Costs, Work, features
from benchmarks.sharded.plan import ranks_of

FILES = {"NCCL": ("gpu-nccl", "sharded-nccl"), "CUDA IPC": ("gpu-ipc", "sharded-ipc")}
WHOLE = (
    "sync_over_dense",
    "moe_sync",
    "moe_sync_most",
    "adamw",
    "large",
    "large_over_dense",
    "sharded_over_dense",
    "sharded_adamw_over_dense",
    "sharded_large",
)
"""Cases that are whole syncs with their parts, each measured once."""

_ROUNDS = 20

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """A record of a whole sync.

    Attributes:
        case, model: As in the record.
        work: What it did.
        parts: Seconds by part, as `features` names them.
        pause: Seconds.
    """

    case: str
    model: str
    work: Work
    parts: Mapping[str, float]
    pause: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def measured(link: str) -> list[Measured]:
    """Every whole sync over a link that benchmarks/results holds."""
    paths = [RESULTS / f"{name}.jsonl" for name in FILES[link]]
    records = [record for path in paths if path.exists() for record in read_records(path)]
    return [_measured(record) for record in records if record.case in WHOLE and record.parts]


def fit(link: str, found: Sequence[Measured]) -> Costs:
    """The costs that explain these best."""
    seconds = {
        name: _fitted(
            np.array([features(one.work)[name] for one in found]),
            np.array([one.parts[name] for one in found]),
            0.0 if name == "commit" else 0.1 * np.array([one.total for one in found]),
        )
        for name in features(found[0].work)
    }
    return Costs(link, seconds)


@dataclass(frozen=True, slots=True)
class Error:
    """How far a prediction is off: predicted / measured - 1."""

    measured: Measured
    sync: float
    pause: float


def errors(costs: Costs, found: Iterable[Measured]) -> list[Error]:
    """Of each record."""
    return [
        Error(
            one,
            costs.sync(one.work) / one.total - 1,
            costs.pause(one.work) / one.pause - 1 if one.pause else 0.0,
        )
        for one in found
    ]


def left_out(link: str) -> list[Error]:
    """The same, each predicted by costs that were fitted without it."""
    found = measured(link)
    return [
        error
        for n, one in enumerate(found)
        for error in errors(fit(link, [*found[:n], *found[n + 1 :]]), [one])
    ]


def _measured(record: Result) -> Measured:
    parts = record.parts
    known = {name: parts[f"{name}_s"] for name in ("diff", "transfer", "commit")}
    rest = max(record.seconds - sum(known.values()), 0.0)
    trainers, engine = ranks_of(record.link) or (1, 1)
    work = Work(
        numel=record.numel,
        parameters=record.parameters,
        changed=record.changed,
        is_dense=record.bytes >= 0.9 * DENSE_BYTES * record.numel,
        trainers=trainers,
        engine=engine,
    )
    return Measured(record.case, record.model, work, {**known, "rest": rest}, parts["pause_s"])


def _fitted(counts: Floats, seconds: Floats, least: Floats | float) -> tuple[float, ...]:
    """Costs whose errors count relative to what was measured and predicted, or to `least`.

    Relative to what was measured alone, what is predicted too small would count less.
    """
    weights = np.maximum(seconds, least)
    costs = _least_squares(counts, seconds, weights)
    for _ in range(_ROUNDS):
        costs = _least_squares(counts, seconds, np.maximum((seconds + counts @ costs) / 2, least))
    return tuple(costs.tolist())


def _least_squares(counts: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Costs that minimize the squares of (predicted - measured) / weight, none below 0.

    Whatever becomes negative is left out, the most negative first, until nothing is.
    """
    scaled = counts / weights[:, None]
    units = np.linalg.norm(scaled, axis=0)
    kept = [n for n in range(counts.shape[1]) if units[n] > 0]
    while True:
        costs = np.zeros(counts.shape[1])
        solved = np.linalg.lstsq(scaled[:, kept] / units[kept], seconds / weights, rcond=None)[0]
        costs[kept] = solved / units[kept]
        if (costs >= 0).all():
            return costs
        kept.remove(int((costs * units).argmin()))
