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
        scale: Key of SCALES; those of a CPU alone begin with "cpu-".
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
    def is_host(self) -> bool:
        """Whether both ends are on a CPU and measured as such, not to try what GPUs do."""
        return self.scale.startswith("cpu-")

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
        return 16 if self.is_host else 4

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
        receivers: Numbers of engines behind one sender.
        moe, moe_density: Models of few, many and most parameters, and the share that changes.
        memory: Densities at which memory is measured.
        bucket_bytes: Payload size where memory is measured.
        large: Model of the last group on two devices; None to leave it out.
        many, files: On a CPU the model of many small parameters, and that of two checkpoints.
    """

    limit_s: float
    densities: tuple[float, ...]
    rounds: int
    warm_ups: int
    baseline_rounds: int
    case_s: float
    receivers: tuple[int, ...] = (1, 2, 3, 4, 7)
    moe: tuple[str, ...] = ("qwen3-1.7b", "moe-small", "kimi-small")
    moe_density: float = 0.003
    memory: tuple[float, ...]
    bucket_bytes: int = 256 << 20  # the default on GPUs
    large: str | None = None
    many: str = ""
    files: str = ""


SCALES = {
    "full": Scale(
        limit_s=410.0,
        densities=(0.0001, 0.001, 0.003, 0.01, 0.05, 0.2, 0.5, 1.0),
        rounds=15,
        warm_ups=3,
        baseline_rounds=7,
        case_s=4.0,
        memory=(0.003, 0.05, 1.0),
        large="qwen3-30b-a3b",
    ),
    "quick": Scale(
        limit_s=140.0,
        densities=(0.0001, 0.003, 0.01, 0.2, 1.0),
        rounds=15,
        warm_ups=3,
        baseline_rounds=3,
        case_s=1.5,
        memory=(0.003, 1.0),
    ),
    "tiny": Scale(
        limit_s=480.0,
        densities=(0.01, 1.0),
        rounds=1,
        warm_ups=0,  # Triton's interpreter takes seconds for each
        baseline_rounds=1,
        case_s=1.0,
        moe=("tiny", "tiny-moe", "tiny-kimi"),
        moe_density=0.01,
        memory=(0.01,),
        bucket_bytes=1 << 16,
        large="tiny-4x",
    ),
    "cpu-full": Scale(
        limit_s=1200.0,
        densities=(0.0001, 0.001, 0.003, 0.01, 0.05, 0.2, 0.5, 1.0),
        rounds=7,
        warm_ups=1,
        baseline_rounds=7,
        case_s=120.0,
        receivers=(1, 16),
        moe_density=0.01,
        memory=(0.003, 0.01, 0.2, 1.0),
        bucket_bytes=8 << 20,
        many="cpu-many",
        files="cpu-files",
    ),
    "cpu-quick": Scale(
        limit_s=300.0,
        densities=(0.0001, 0.003, 0.01, 0.2, 1.0),
        rounds=5,
        warm_ups=1,
        baseline_rounds=5,
        case_s=30.0,
        receivers=(1, 4),
        moe_density=0.01,
        memory=(0.003, 1.0),
        bucket_bytes=1 << 20,
        many="cpu-many",
        files="cpu",
    ),
    "cpu-tiny": Scale(
        limit_s=300.0,
        densities=(0.01, 1.0),
        rounds=2,
        warm_ups=1,
        baseline_rounds=1,
        case_s=10.0,
        receivers=(1, 2),
        moe_density=0.01,
        memory=(0.01,),
        bucket_bytes=1 << 16,
        many="tiny-many",
        files="tiny",
    ),
}
