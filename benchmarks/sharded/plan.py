"""What a run measures, and which ranks it has where."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Self

import torch

from benchmarks.gpu.geometry import GEOMETRIES, Geometry
from benchmarks.gpu.setup import TRANSPORTS, Link

_LARGE = 10_000_000_000  # elements; with the other ways such a model does not fit into four GPUs


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """Handed to every rank of a run, as JSON.

    Attributes:
        trainers: Ranks of the trainer, which come first.
        engines: Ranks of one engine that is tensor parallel; experts are spread.
        geometry: Key of GEOMETRIES.
        parallel: How the trainer's ranks share the model: "fsdp2" or "tensor".
        gathers: Whether the other ways take turns, and AdamW steps are sent: these take the memory
            of several models, and shards of equal numbers of rows.
        device_type: "cuda" or "cpu".
        link: "local": a trainer and an engine rank share each GPU, joined by CUDA IPC, on CPUs by
            shared memory. "collective": each rank has a GPU, joined by NCCL, on CPUs by gloo.
        densities: Shares of changed elements.
        rounds: Times that each way takes its turn.
        steps: Of AdamW.
    """

    trainers: int
    engines: int
    geometry: str
    parallel: str
    gathers: bool
    device_type: str
    link: Link
    densities: tuple[float, ...]
    rounds: int
    steps: int

    @classmethod
    def choose(
        cls,
        scale: str,
        geometry: str | None,
        device: str | None,
        link: str | None,
        parallel: str | None = None,
    ) -> Self:
        """For "full", "quick" or "tiny", and what this machine has. Raises ValueError."""
        num_gpus = torch.cuda.device_count()
        device_type = device or ("cuda" if num_gpus else "cpu")
        if device_type == "cuda" and num_gpus < 2:
            raise ValueError("trainers of several ranks want two GPUs; see --device cpu --tiny")
        if link not in (None, "local", "collective"):
            raise ValueError(f"link {link!r} is neither local nor collective")
        chosen: Link = "local" if link == "local" or (not link and num_gpus < 4) else "collective"
        per_side = max(2, num_gpus // (2 if chosen == "collective" else 1))
        usual = "qwen3-8b" if device_type == "cuda" else "engine"
        model = geometry or ("tiny" if scale == "tiny" else usual)
        if model not in GEOMETRIES:
            raise ValueError(f"geometry {model!r} is not one of {', '.join(GEOMETRIES)}")
        if parallel not in (None, "fsdp2", "tensor"):
            raise ValueError(f"parallel {parallel!r} is neither fsdp2 nor tensor")
        is_large = _is_large(GEOMETRIES[model])
        how = parallel or ("tensor" if is_large else "fsdp2")
        gathers = how == "fsdp2" and not is_large
        if scale == "tiny":
            return cls(2, 2, model, how, gathers, device_type, chosen, (0.01,), 2, 1)
        densities, rounds = ((0.01,), 3) if scale == "quick" else ((0.001, 0.003, 0.01, 0.05), 7)
        sides = (per_side, per_side, model, how, gathers)
        return cls(*sides, device_type, chosen, densities, rounds, rounds)

    @property
    def world(self) -> int:
        return self.trainers + self.engines

    @property
    def is_large(self) -> bool:
        """Whether the model does not fit beside the other ways."""
        return _is_large(self.model)

    @property
    def model(self) -> Geometry:
        return GEOMETRIES[self.geometry]

    @property
    def where(self) -> str:
        """In words, for records."""
        how = "tensor-parallel " if self.parallel == "tensor" else ""
        sides = f"{self.trainers} {how}trainer ranks, {self.engines} engine ranks"
        shares_gpus = (self.device_type, self.link) == ("cuda", "local")
        on = " on the same GPUs" if shares_gpus else ""
        return f"{TRANSPORTS[self.device_type, self.link]}, {sides}{on}"

    def device(self, rank: int) -> torch.device:
        """Where a rank keeps its weights."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank % self.trainers if self.link == "local" else rank)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**fields | {"densities": tuple(fields["densities"])})


def ranks_of(link: str) -> tuple[int, int] | None:
    """Ranks of trainer and engine, as `ShardedPlan.where` says them; None for another link."""
    found = re.search(r"(\d+) \S*\s?trainer ranks, (\d+) engine ranks", link)
    return (int(found[1]), int(found[2])) if found else None


def _is_large(geometry: Geometry) -> bool:
    return geometry.numel > _LARGE
