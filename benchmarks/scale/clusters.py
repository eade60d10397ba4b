"""Predictions for clusters that were not measured: fitted costs, and assumptions that are named."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scale.model import Costs, Work

NVLINK = 360e9
"""Bytes a second that NCCL broadcasts between two GPUs of a node; of 450e9 by data sheet."""

NETWORK = 45e9
"""Bytes a second into one GPU of another node: 90 % of a 400 Gbit/s adapter for each GPU."""

HOP_S = 20e-6
"""Delay of one hop of a broadcast, which passes from GPU to GPU in a ring."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that people train, in bf16.

    Attributes:
        numel, parameters: Elements, and tensors of its checkpoint.
        trainers, engine: GPUs that the trainer takes, and one engine.
    """

    name: str
    numel: float
    parameters: int
    trainers: int
    engine: int


MODELS = (
    Model("8B, dense", 8.2e9, 399, 4, 2),
    Model("30B, mixture", 30.5e9, 18_867, 4, 4),
    Model("70B, dense", 70.6e9, 723, 16, 4),
    Model("235B, mixture", 235e9, 36_000, 64, 8),
    Model("671B, mixture", 671e9, 91_000, 256, 16),
    Model("1T, mixture", 1.03e12, 70_000, 512, 32),
)
GPUS = (8, 64, 512, 4096)
DENSITY = 0.003


@dataclass(frozen=True, slots=True)
class Prediction:
    """One sync of a model on a cluster.

    Attributes:
        gpus, engines: Of the whole cluster; what the trainer does not take serves.
        sync_s, pause_s: Seconds.
        parts: Seconds by part, with "network" and "receivers" besides those of `Costs`.
    """

    model: Model
    gpus: int
    engines: int
    sync_s: float
    pause_s: float
    parts: dict[str, float]


def predict(
    costs: Costs, each_receiver_s: float, model: Model, gpus: int, density: float = DENSITY
) -> Prediction | None:
    """None if the cluster has no room for the trainer and one engine.

    Args:
        costs: Of two or more GPUs of a node.
        each_receiver_s: The trainer's host work for each rank of each engine.
    """
    engines = (gpus - model.trainers) // model.engine
    if engines < 1:
        return None
    work = Work(
        numel=model.numel,
        parameters=model.parameters,
        changed=density * model.numel,
        trainers=model.trainers,
        engine=model.engine,
    )
    parts, ranks = costs.parts(work), engines * model.engine
    parts["network"] = _network(work.num_bytes, ranks) if gpus > 8 else 0.0
    parts["receivers"] = each_receiver_s * ranks
    pause = parts["commit"]
    if work.is_in_place:
        pause += parts["transfer"] + parts["network"]
    return Prediction(model, gpus, engines, sum(parts.values()), pause, parts)


def _network(num_bytes: float, ranks: int) -> float:
    """What a broadcast to GPUs of other nodes takes longer than one within a node."""
    return num_bytes * (1 / NETWORK - 1 / NVLINK) + HOP_S * (ranks - 1)
