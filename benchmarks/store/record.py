"""The record of one way over one link. JSON lines in benchmarks/results/store-cpu.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.record import RESULTS, Environment

RECORDS = RESULTS / "store-cpu.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord:
    """One way, one link, one pair of versions.

    Attributes:
        way: Its name. `is_ours`: whether it is a delta of deltasync.
        bits_per_s: Of each direction of the link.
        pair: Name of the pair, as in `benchmarks.codec.pairs`.
        numel, dense_bytes: Elements of the model, and their bytes.
        changed: Elements that differ.
        publish_samples, fetch_samples: Seconds of the trainer's part and of the engine's, by round.
        up_bytes, down_bytes: That went over the link in a round, requests and headers included.
    """

    way: str
    is_ours: bool
    bits_per_s: float
    pair: str
    numel: int
    dense_bytes: int
    changed: int
    publish_samples: tuple[float, ...]
    fetch_samples: tuple[float, ...]
    up_bytes: int
    down_bytes: int
    environment: Environment = field(default_factory=Environment.here)

    @property
    def density(self) -> float:
        return self.changed / self.numel

    @property
    def samples(self) -> list[float]:
        """Seconds from the trainer's step to the committed engine, by round."""
        rounds = zip(self.publish_samples, self.fetch_samples, strict=True)
        return [publish + fetch for publish, fetch in rounds]

    @property
    def seconds(self) -> float:
        return median(self.samples)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        data: dict[str, Any] = json.loads(line)
        environment = Environment(**data.pop("environment"))
        for name in ("publish_samples", "fetch_samples"):
            data[name] = tuple(data[name])
        return cls(**data, environment=environment)


def read_records(path: Path) -> list[StoreRecord]:
    """The last record of each way over each link, in their order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (StoreRecord.from_json(line) for line in lines)
    return list({(one.pair, one.numel, one.bits_per_s, one.way): one for one in found}.values())


def append_records(path: Path, records: Iterable[StoreRecord]) -> Iterator[StoreRecord]:
    """Pass records on, each written before the next is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(record.to_json() + "\n")
            file.flush()
            yield record
