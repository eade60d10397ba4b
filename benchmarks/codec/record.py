"""The record of one coder on one pair. JSON lines in benchmarks/results/codec-cpu.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import zstandard

from benchmarks.codec.pairs import name_of
from benchmarks.record import RESULTS, Environment

RECORDS = RESULTS / "codec-cpu.jsonl"
GOAL_NUMEL = 100_000_000  # goals are for models of this size or more
BYTE_GOALS = {
    ("gap, ulp, zstd", "masters-1e-6-k1"): 1.42,
    ("block", "masters-1e-6-k1"): 2.0,
    ("class", "masters-1e-6-k1"): 1.02,
    ("gap, ulp, zstd", "masters-3e-6-k1"): 1.20,
    ("block", "masters-3e-6-k1"): 1.70,
    ("class", "masters-3e-6-k1"): 0.95,
}
"""The most bytes per change, by coder and pair."""
CHANGES_GOAL = {"gap, ulp, zstd": 60e6}
"""Changes a second, by coder, on the pairs of BYTE_GOALS."""
DENSE_GOAL = {"class": 0.25e9}
"""Bytes of dense weights a second, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRecord:
    """What one coder made of one pair.

    Attributes:
        kept, lr, steps, form: Of the pair, as in `pairs.Pair`.
        numel, dense_bytes: Elements of all tensors, and their bytes.
        changed: Elements that differ.
        coder: Its name. `is_ours`: whether it is a codec of the wire format.
        bytes: All that is sent, headers and tables included.
        encode_samples, decode_samples: Seconds, by round. Coders take turns in each round.
        bound_bytes, known_bound_bytes: The entropy bounds with the weights unknown, and with the
            exponents of the old weights known.
        zstd: Versions of the library and its binding.
    """

    kept: str
    lr: float
    steps: int
    form: str
    numel: int
    dense_bytes: int
    changed: int
    coder: str
    is_ours: bool
    bytes: int
    encode_samples: tuple[float, ...]
    decode_samples: tuple[float, ...]
    bound_bytes: float
    known_bound_bytes: float
    zstd: str = ".".join(map(str, zstandard.ZSTD_VERSION)) + f", zstandard {zstandard.__version__}"
    environment: Environment = field(default_factory=Environment.here)

    @property
    def pair(self) -> str:
        return name_of(self.kept, self.lr, self.steps, self.form)

    @property
    def density(self) -> float:
        return self.changed / self.numel

    @property
    def bytes_each(self) -> float:
        """Per changed element."""
        return self.bytes / self.changed

    @property
    def encode_s(self) -> float:
        return median(self.encode_samples)

    @property
    def decode_s(self) -> float:
        return median(self.decode_samples)

    @property
    def goal(self) -> float | None:
        """The most bytes per change; None where there is no goal."""
        return BYTE_GOALS.get((self.coder, self.pair)) if self.numel >= GOAL_NUMEL else None

    @property
    def is_met(self) -> bool:
        return self.goal is None or self.bytes_each <= self.goal

    def slowest_allowed_s(self) -> float | None:
        """The most seconds that encoding, and decoding, may take; None without a goal."""
        if self.goal is None:
            return None
        if self.coder in CHANGES_GOAL:
            return self.changed / CHANGES_GOAL[self.coder]
        return self.dense_bytes / DENSE_GOAL[self.coder] if self.coder in DENSE_GOAL else None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        data: dict[str, Any] = json.loads(line)
        environment = Environment(**data.pop("environment"))
        for name in ("encode_samples", "decode_samples"):
            data[name] = tuple(data[name])
        return cls(**data, environment=environment)


def read_records(path: Path) -> list[CodecRecord]:
    """The last record of each coder on each pair, in their order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (CodecRecord.from_json(line) for line in lines)
    return list({(one.pair, one.numel, one.coder): one for one in found}.values())


def append_records(path: Path, records: Iterable[CodecRecord]) -> Iterator[CodecRecord]:
    """Pass records on, each written before the next is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(record.to_json() + "\n")
            file.flush()
            yield record
