"""The one result record: what was measured, against what, on which machine. JSON lines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
_OUTPUTS = (":!benchmarks/results", ":!docs/images")  # what a run itself writes is no change

RatioIs = Literal[
    "baseline_seconds / seconds",
    "seconds / baseline_seconds",
    "bytes / bound_bytes",
    "microseconds / parameter",
    "bytes / changed",
]
SPEED_UP: RatioIs = "baseline_seconds / seconds"
SLOW_DOWN: RatioIs = "seconds / baseline_seconds"
MEMORY: RatioIs = "bytes / bound_bytes"
GOAL_NUMEL = 16 << 20  # goals are for models; below this, costs that do not grow stand out
PER_PARAMETER: RatioIs = "microseconds / parameter"
PER_CHANGE: RatioIs = "bytes / changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the software.

    `dirty`: the tree differed from `commit`. `gpu`: what GPUs are there and how many, or "".
    `zstd`: versions of the library and its binding, or "".
    """

    cpu: str
    cores: int
    capability: str
    python: str
    torch: str
    numpy: str
    commit: str
    dirty: bool
    time: str
    gpu: str = ""
    zstd: str = ""

    @classmethod
    @lru_cache(maxsize=1)
    def here(cls) -> Self:
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            capability=torch.backends.cpu.get_cpu_capability(),
            python=platform.python_version(),
            torch=torch.__version__,
            numpy=np.__version__,
            commit=_git("rev-parse", "HEAD") or "unknown",
            dirty=bool(_git("status", "--porcelain", "--", ".", *_OUTPUTS)),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            gpu=_gpu_model(),
            zstd=_zstd(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case at one size and density.

    Attributes:
        case: What was measured; `benchmarks.report.TITLES` says it in words.
        numel: Elements of the model. `parameters`: how many tensors hold them.
        density: Share of the elements that the case changes, 0 to 1; `changed`: how many.
        seconds: Median of `samples`. `baseline_seconds` likewise; 0 without a baseline.
        baseline: What the baseline is, in words.
        ratio: Median over the rounds; a round runs case and baseline one after the other.
        ratio_is: Which way round it is. A speed-up has to reach the goal, all else to stay below.
        goal: None where none is set. `met`: whether it is; True without one.
        bytes: What travelled, or the memory taken. `bound_bytes`: the most it may be, or 0.
        parts: Medians of parts of `seconds`, by name.
        model: Which geometry, or which pair of versions of a trained model.
        link: What joins the two ends.
        way: Which of several ways to do it, where a case has more than one beside the baseline.
    """

    case: str
    numel: int
    parameters: int
    density: float
    changed: int
    seconds: float
    samples: tuple[float, ...]
    baseline: str = ""
    baseline_seconds: float = 0.0
    baseline_samples: tuple[float, ...] = ()
    ratio: float
    ratio_is: RatioIs
    goal: float | None = None
    met: bool = True
    bytes: int = 0
    bound_bytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    model: str = ""
    link: str = ""
    way: str = ""
    environment: Environment = field(default_factory=Environment.here)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        data: dict[str, Any] = json.loads(line)
        environment = Environment(**data.pop("environment"))
        for name in ("samples", "baseline_samples"):
            data[name] = tuple(data[name])
        return cls(**data, environment=environment)


def compared(
    *,
    samples: Sequence[float],
    baseline_samples: Sequence[float],
    ratio_is: RatioIs,
    goal: float | None,
    **fields: Any,
) -> Result:
    """The record of a case that ran beside a baseline, round by round.

    The goal is left out where the model is too small for it.
    """
    rounds = list(zip(samples, baseline_samples, strict=True))
    up = ratio_is == SPEED_UP
    if fields["numel"] < GOAL_NUMEL:
        goal = None
    ratio = median(b / s if up else s / b for s, b in rounds)
    return Result(
        seconds=median(samples),
        samples=tuple(samples),
        baseline_seconds=median(baseline_samples),
        baseline_samples=tuple(baseline_samples),
        ratio=ratio,
        ratio_is=ratio_is,
        goal=goal,
        met=goal is None or (ratio >= goal if up else ratio <= goal),
        **fields,
    )


def read_records(path: Path) -> list[Result]:
    """The last record of each case, way, model, link, size and density in a file."""
    found: dict[tuple[object, ...], Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        result = Result.from_json(line)
        key = result.case, result.way, result.model, result.link, result.numel, result.density
        found[key] = result
    return list(found.values())


def append_records(path: Path, results: Iterable[Result]) -> Iterator[Result]:
    """Pass records on, each written before the next is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for result in results:
            file.write(result.to_json() + "\n")
            file.flush()
            yield result


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _zstd() -> str:
    """Such as "1.5.7, zstandard 0.25.0"."""
    try:
        import zstandard
    except ImportError:
        return ""
    return ".".join(map(str, zstandard.ZSTD_VERSION)) + f", zstandard {zstandard.__version__}"


def _gpu_model() -> str:
    """Such as "2 x NVIDIA H200"."""
    if not torch.cuda.is_available():
        return ""
    names = Counter(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    return ", ".join(f"{count} x {name}" for name, count in names.items())
