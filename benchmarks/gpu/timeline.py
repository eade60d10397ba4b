"""One sync on one clock: what both hosts, and both GPUs, do when."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.gpu.pair import Pair, open_engine, open_pair
from benchmarks.gpu.recording import LANES, Recording, Span
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.workload import mutate
from benchmarks.record import Environment
from benchmarks.report import describe, row

DENSITIES = (0.0001, 0.003)
_WARM_UPS, _SYNCS = 3, 7


@dataclass(frozen=True, slots=True)
class Timeline:
    """One sync of several, that of the median time.

    Attributes:
        link, model: As in `Result`.
        density: Share of the elements that changed.
        seconds: From the call of `send_weights` to its return, with all that notes it.
        spans: In the order in which they began.
        environment: Where.
    """

    link: str
    model: str
    density: float
    seconds: float
    spans: tuple[Span, ...]
    environment: Environment

    def to_json(self) -> str:
        """One line."""
        spans = [(s.lane, s.what, s.begin_ns, s.end_ns) for s in self.spans]
        fields = {"link": self.link, "model": self.model, "density": self.density}
        rest = {"seconds": self.seconds, "spans": spans, "environment": asdict(self.environment)}
        return json.dumps(fields | rest)

    @classmethod
    def from_json(cls, line: str) -> Self:
        data: dict[str, Any] = json.loads(line)
        data["spans"] = tuple(Span(*one) for one in data["spans"])
        return cls(**data | {"environment": Environment(**data["environment"])})


def run(setup: Setup) -> Iterator[Timeline]:
    """A timeline at each density."""
    for density in DENSITIES:
        with open_engine(setup) as engine, open_pair(engine, setup.geometry) as pair:
            for seed in range(_WARM_UPS):
                mutate(pair.module, density, seed)
                pair.sync()
            yield _recorded(setup, pair, density)
            pair.check()


def read(path: Path) -> list[Timeline]:
    """Those of a file."""
    return [Timeline.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_markdown(timelines: Sequence[Timeline]) -> str:
    """Milliseconds of each thing done, one column a share that changed."""
    took = [totals(one) for one in timelines]
    shares = [f"{100 * one.density:g} %" for one in timelines]
    lines = [row(("who", "what", *shares)), row(("---", "---", *("---:" for _ in shares)))]
    lines.append(row(("", "whole sync", *(f"{1e3 * one.seconds:.2f} ms" for one in timelines))))
    for lane in LANES:
        found = {what for of in took for at, what in of if at == lane}
        longest = sorted(found, key=lambda what: -max(of.get((lane, what), 0) for of in took))
        lines += [
            row((lane, what, *(f"{of.get((lane, what), 0) / 1e6:.2f} ms" for of in took)))
            for what in longest
        ]
    return "\n".join((*lines, "", f"{describe(timelines[0].environment)}"))


def totals(timeline: Timeline) -> dict[tuple[str, str], int]:
    """Nanoseconds by lane and by what was done."""
    took: dict[tuple[str, str], int] = defaultdict(int)
    for span in timeline.spans:
        took[span.lane, span.what] += span.end_ns - span.begin_ns
    return took


def _recorded(setup: Setup, pair: Pair, density: float) -> Timeline:
    recording = Recording("trainer", setup.device("trainer"))
    pair.record()
    for seed in range(_SYNCS):
        mutate(pair.module, density, _WARM_UPS + seed)
        pair.sync()
    spans = [*recording.stop(), *pair.recorded()]
    begin, end = sorted(recording.calls, key=lambda call: call[1] - call[0])[_SYNCS // 2]
    return Timeline(
        setup.transport,
        setup.geometry,
        density,
        (end - begin) / 1e9,
        tuple(_cut(spans, begin, end)),
        Environment.here(),
    )


def _cut(spans: Iterable[Span], begin: int, end: int) -> Iterator[Span]:
    """What lies between two times, counted from the first of them."""
    for span in sorted(spans, key=lambda one: (one.begin_ns, one.lane)):
        first, last = max(span.begin_ns, begin), min(span.end_ns, end)
        if first < last:
            yield Span(span.lane, span.what, first - begin, last - begin)
