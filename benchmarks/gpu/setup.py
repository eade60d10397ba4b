"""What a run measures, and where its two ends are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self

import torch

from benchmarks.gpu.geometry import GEOMETRIES, Geometry

Link = Literal["local", "collective"]
"""Both ends on one device (CUDA IPC, shared memory), or one each (NCCL, gloo)."""

TRANSPORTS = {
    ("cuda", "collective"): "NCCL",
    ("cuda", "local"): "CUDA IPC",
    ("cpu", "collective"): "gloo",
    ("cpu", "local"): "shared memory",
}
"""By type of device and link, in words."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Handed to every process of a run, as JSON.

    Attributes:
        scale: Key of SCALES.
        geometry: Key of GEOMETRIES: the model of most cases.
        device_type: "cuda" or "cpu".
        link: How the two ends are joined.
        engine: Number of the engine that a process is, from 1.
    """

    scale: str
    geometry: str
    device_type: str
    link: Link
    engine: int = 1

    @classmethod
    def choose(
        cls, scale: str, geometry: str, device: str | None = None, link: str | None = None
    ) -> Self:
        """Fill in what was left open from what this machine has. Raises ValueError."""
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device_type = device or ("cuda" if num_gpus else "cpu")
        if geometry not in GEOMETRIES:
            raise ValueError(f"geometry {geometry!r} is not one of {', '.join(GEOMETRIES)}")
        if device_type not in ("cuda", "cpu"):
            raise ValueError(f"device {device_type!r} is neither cuda nor cpu")
        if device_type == "cuda" and not num_gpus:
            raise ValueError("no GPU is here; --device cpu --geometry tiny shows that all runs")
        if link not in (None, "local", "collective"):
            raise ValueError(f"link {link!r} is neither local nor collective")
        if link == "collective" and device_type == "cuda" and num_gpus < 2:
            raise ValueError("NCCL wants a GPU for each end")
        two = num_gpus > 1 and device_type == "cuda"
        chosen: Link = "collective" if link == "collective" or (two and not link) else "local"
        return cls("tiny" if geometry == "tiny" else scale, geometry, device_type, chosen)

    @property
    def transport(self) -> str:
        """In words, for records."""
        return TRANSPORTS[self.device_type, self.link]

    @property
    def model(self) -> Geometry:
        return GEOMETRIES[self.geometry]

    def device(self, end: Literal["trainer", "engine"]) -> torch.device:
        """Where an end keeps its weights."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        own = self.link == "collective" and end == "engine"
        return torch.device("cuda", self.engine if own else 0)

    @property
    def most_engines(self) -> int:
        """How many may be joined to one trainer here."""
        if self.device_type == "cuda" and self.link == "collective":
            return torch.cuda.device_count() - 1
        return 4

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much a run measures.

    Attributes:
        limit_s: Of the whole run, process starts included; groups that do not fit are left out.
        densities: Shares of changed elements in sweeps.
        rounds, warm_ups: Syncs that count, and those before them.
        baseline_rounds: Times that a baseline runs, after one that does not count.
        case_s: Rounds end early when one case at one density took this long, but not before 3.
        commits: Geometries that the commit is measured on, the smallest first.
        commit_nnz: Elements changed in each of them.
        moe, moe_density: Models of few, many and most parameters, and the share that changes.
        memory: Densities at which memory is measured.
        bucket_bytes: Payload size where memory is measured.
        large: Model of the last group on two devices; None to leave it out.
    """

    limit_s: float
    densities: tuple[float, ...]
    rounds: int
    warm_ups: int
    baseline_rounds: int
    case_s: float
    commits: tuple[str, ...]
    commit_nnz: int
    moe: tuple[str, str, str]
    moe_density: float
    memory: tuple[float, ...]
    bucket_bytes: int
    large: str | None


SCALES = {
    "full": Scale(
        limit_s=410.0,
        densities=(0.0001, 0.001, 0.003, 0.01, 0.05, 0.2, 0.5, 1.0),
        rounds=15,
        warm_ups=3,
        baseline_rounds=7,
        case_s=4.0,
        commits=("commit-1x", "commit-4x", "commit-16x"),
        commit_nnz=2 << 20,
        moe=("qwen3-1.7b", "moe-small", "kimi-small"),
        moe_density=0.003,
        memory=(0.003, 0.05, 1.0),
        bucket_bytes=256 << 20,  # the default on GPUs
        large="qwen3-30b-a3b",
    ),
    "quick": Scale(
        limit_s=140.0,
        densities=(0.0001, 0.003, 0.01, 0.2, 1.0),
        rounds=15,
        warm_ups=3,
        baseline_rounds=3,
        case_s=1.5,
        commits=("commit-1x", "commit-16x"),
        commit_nnz=2 << 20,
        moe=("qwen3-1.7b", "moe-small", "kimi-small"),
        moe_density=0.003,
        memory=(0.003, 1.0),
        bucket_bytes=256 << 20,  # the default on GPUs
        large=None,
    ),
    "tiny": Scale(
        limit_s=480.0,
        densities=(0.01, 1.0),
        rounds=1,
        warm_ups=0,  # Triton's interpreter takes seconds for each
        baseline_rounds=1,
        case_s=1.0,
        commits=("tiny", "tiny-4x"),
        commit_nnz=1000,
        moe=("tiny", "tiny-moe", "tiny-kimi"),
        moe_density=0.01,
        memory=(0.01,),
        bucket_bytes=1 << 16,
        large="tiny-4x",
    ),
}
