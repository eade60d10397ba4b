"""What a run measures, and which ranks it has where."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Literal, Self

import torch

from benchmarks.syncs.geometry import GEOMETRIES, Geometry

Link = Literal["local", "collective"]
"""Both ends on one device (CUDA IPC, shared memory), or one each (NCCL, gloo)."""

TRANSPORTS = {
    ("cuda", "collective"): "NCCL",
    ("cuda", "local"): "CUDA IPC",
    ("cpu", "collective"): "gloo",
    ("cpu", "local"): "shared memory",
}
"""By type of device and link, in words."""
_LARGE = 10_000_000_000  # elements; with the other ways such a model does not fit into four GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Handed to every rank of a run, as JSON. Ranks of the trainer come first.

    Attributes:
        scale: Key of SCALES; those of a CPU alone begin with "cpu-".
        geometry: Key of GEOMETRIES: the model of most cases.
        device_type: "cuda" or "cpu".
        link: How the two ends are joined.
        group: Which cases a run has.
        trainers: Ranks of the trainer.
        engines: Engines of one rank, or the ranks of one engine if `parallel` is not "".
        parallel: How several ranks of a trainer share the model: "fsdp2" or "tensor".
        form: What the engine serves; "" for the trainer's dtype.
    """

    scale: str
    geometry: str
    device_type: str
    link: Link
    group: str = ""
    trainers: int = 1
    engines: int = 1
    parallel: str = ""
    form: str = ""

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
        scale = "tiny" if geometry == "tiny" else scale
        return cls(scale=scale, geometry=geometry, device_type=device_type, link=chosen)

    @classmethod
    def sharded(
        cls,
        scale: str,
        geometry: str | None,
        device: str | None,
        link: str | None,
        parallel: str | None,
    ) -> Self:
        """The same with several ranks at each end. Raises ValueError."""
        num_gpus = torch.cuda.device_count()
        device = device or ("cuda" if num_gpus else "cpu")
        if device == "cuda" and num_gpus < 2:
            raise ValueError("trainers of several ranks want two GPUs; see --device cpu --tiny")
        if parallel not in (None, "fsdp2", "tensor"):
            raise ValueError(f"parallel {parallel!r} is neither fsdp2 nor tensor")
        usual = "qwen3-8b" if device == "cuda" else "engine"
        geometry = geometry or ("tiny" if scale == "tiny" else usual)
        link = link or ("local" if num_gpus < 4 else "collective")
        chosen = cls.choose(scale, geometry, device, link)
        ranks = max(2, num_gpus // (2 if chosen.link == "collective" else 1))
        ranks = 2 if scale == "tiny" else ranks
        return cls(
            scale=f"sharded-{scale}",
            geometry=geometry,
            device_type=device,
            link=chosen.link,
            group="sharded",
            trainers=ranks,
            engines=ranks,
            parallel=parallel or ("tensor" if chosen.is_large else "fsdp2"),
        )

    @property
    def is_host(self) -> bool:
        """Whether both ends are on a CPU and measured as such, not to try what GPUs do."""
        return self.scale.startswith("cpu-")

    @property
    def is_large(self) -> bool:
        """Whether the model of several ranks does not fit beside the other ways."""
        return self.model.numel > _LARGE

    @property
    def gathers(self) -> bool:
        """Whether a trainer of several ranks is measured against other ways, too."""
        return self.parallel == "fsdp2" and not self.is_large

    @property
    def world(self) -> int:
        return self.trainers + self.engines

    @property
    def sizes(self) -> Scale:
        return SCALES[self.scale]

    @property
    def model(self) -> Geometry:
        return GEOMETRIES[self.geometry]

    @property
    def transport(self) -> str:
        """In words."""
        return TRANSPORTS[self.device_type, self.link]

    @property
    def where(self) -> str:
        """In words, for records: the transport, and how many ranks there are if several."""
        if not self.parallel:
            return self.transport
        how = "tensor-parallel " if self.parallel == "tensor" else ""
        sides = f"{self.trainers} {how}trainer ranks, {self.engines} engine ranks"
        on = " on the same GPUs" if self.transport == "CUDA IPC" else ""
        return f"{self.transport}, {sides}{on}"

    @property
    def most_engines(self) -> int:
        """How many may be joined to one trainer here."""
        if self.device_type == "cuda" and self.link == "collective":
            return torch.cuda.device_count() - 1
        return 16 if self.is_host else 4

    def device(self, rank: int) -> torch.device:
        """Where a rank keeps its weights."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank % self.trainers if self.link == "local" else rank)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def ranks_of(link: str) -> tuple[int, int] | None:
    """Ranks of trainer and engine, as `Plan.where` says them; None for another link."""
    found = re.search(r"(\d+) \S*\s?trainer ranks, (\d+) engine ranks", link)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much a run measures.

    Attributes:
        densities: Shares of changed elements in sweeps.
        rounds, warm_ups: Syncs that count, and those before them.
        baseline_rounds: Times that a baseline runs, after one that does not count.
        receivers: Numbers of engines behind one sender.
        density: The share that changes where only one does.
        moe: Models of few, many and most parameters.
        memory: Densities at which memory is measured.
        bucket_bytes: Payload size where memory is measured.
        large: Model of the last group on two devices; "" to leave it out.
        many, files: On a CPU the model of many small parameters, and that of two checkpoints.
    """

    densities: tuple[float, ...]
    rounds: int
    warm_ups: int = 3
    baseline_rounds: int = 7
    receivers: tuple[int, ...] = (1, 2, 3, 4, 7)
    density: float = 0.003
    moe: tuple[str, ...] = ("qwen3-1.7b", "moe-small", "moe-most")
    memory: tuple[float, ...] = (0.003, 1.0)
    bucket_bytes: int = 256 << 20  # the default on GPUs
    large: str = ""
    many: str = ""
    files: str = ""


_SWEEP = (0.0001, 0.001, 0.003, 0.01, 0.05, 0.2, 0.5, 1.0)
_SHORT = (0.0001, 0.003, 0.01, 0.2, 1.0)
SCALES = {
    "full": Scale(densities=_SWEEP, rounds=15, memory=(0.003, 0.05, 1.0), large="qwen3-30b-a3b"),
    "quick": Scale(densities=_SHORT, rounds=15, baseline_rounds=3),
    "tiny": Scale(
        densities=(0.01, 1.0),
        rounds=1,
        warm_ups=0,  # Triton's interpreter takes seconds for each
        baseline_rounds=1,
        receivers=(1, 2),
        density=0.01,
        moe=("tiny", "tiny-moe", "tiny-most"),
        memory=(0.01,),
        bucket_bytes=1 << 16,
        large="tiny-4x",
    ),
    "cpu-full": Scale(
        densities=_SWEEP,
        rounds=7,
        warm_ups=1,
        receivers=(1, 16),
        density=0.01,
        memory=(0.003, 0.01, 0.2, 1.0),
        bucket_bytes=8 << 20,
        many="cpu-many",
        files="cpu-files",
    ),
    "cpu-quick": Scale(
        densities=_SHORT,
        rounds=5,
        warm_ups=1,
        receivers=(1, 4),
        density=0.01,
        bucket_bytes=1 << 20,
        many="cpu-many",
        files="cpu",
    ),
    "cpu-tiny": Scale(
        densities=(0.01, 1.0),
        rounds=2,
        warm_ups=1,
        receivers=(1, 2),
        density=0.01,
        memory=(0.01,),
        bucket_bytes=1 << 16,
        many="tiny-many",
        files="tiny",
    ),
    "sharded-full": Scale(densities=(0.001, 0.003, 0.01, 0.05), rounds=7),
    "sharded-quick": Scale(densities=(0.01,), rounds=3),
    "sharded-tiny": Scale(densities=(0.01,), rounds=2),
}
