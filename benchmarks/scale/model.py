"""What a sync costs, as a sum of few terms, each proportional to something that can be counted.

A sync has four parts, which follow each other: `diff` (the trainer compares), `transfer` (packing,
sending, staging, checks), `commit` (the engine's pause), and `rest` (messages and host work). Each
part is linear in its features:

    diff      1; elements and changes of one trainer rank; parameters; 1 for several trainer ranks
    transfer  1, changes sent sparse, elements sent dense, parameters, further trainer ranks
    commit    1; if the sync was staged: 1, changes that a rank looks at, sectors that it writes
    rest      1, parameters, further trainer ranks

An engine rank receives what all trainer ranks send, and writes what it holds. So changes and dense
elements count as a whole in `transfer`, whatever the number of engine ranks. A sector is 32 bytes,
the least that a GPU writes: of n elements in sectors of 16, changed at random with density d,
n / 16 * (1 - (1 - d)^16) sectors change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SPARSE_BYTES = 6  # int32 and bfloat16
DENSE_BYTES = 2
_SECTOR = 16  # elements of two bytes
_STAGED = 0.25  # of an engine rank's weights: more is written as it arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sync of a bf16 model.

    Attributes:
        numel, parameters: Of the model.
        changed: Elements that differ, of the whole model.
        is_dense: Whether everything is sent.
        trainers, engine: Ranks of the trainer, and of one engine, each with its share of the model.
    """

    numel: float
    parameters: float
    changed: float
    is_dense: bool = False
    trainers: int = 1
    engine: int = 1

    @property
    def num_bytes(self) -> float:
        """Payload bytes that each receiver takes."""
        return self.numel * DENSE_BYTES if self.is_dense else self.changed * SPARSE_BYTES

    @property
    def is_in_place(self) -> bool:
        """Whether it is too large to be staged, and written in the pause as it arrives."""
        return self.num_bytes > _STAGED * self.numel * DENSE_BYTES / self.engine

    @property
    def sectors(self) -> float:
        """That one engine rank writes when it commits."""
        unchanged = (1 - self.changed / self.numel) ** _SECTOR
        return self.numel / _SECTOR / self.engine * (1 - unchanged)


def features(work: Work) -> Mapping[str, tuple[float, ...]]:
    """The numbers that each part is linear in, in the order of the module's docstring."""
    more = work.trainers - 1.0
    sparse, dense = (0.0, work.numel) if work.is_dense else (work.changed, 0.0)
    staged = 0.0 if work.is_in_place else 1.0
    return MappingProxyType(
        {
            "diff": (
                1.0,
                work.numel / work.trainers,
                work.changed / work.trainers,
                work.parameters,
                min(more, 1),
            ),
            "transfer": (1.0, sparse, dense, work.parameters, more),
            "commit": (1.0, staged, staged * sparse, staged * work.sectors),
            "rest": (1.0, work.parameters, more),
        }
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for each feature of each part, on one kind of machine and link.

    Attributes:
        link: What joined the two ends where it was measured.
        seconds: By part, in the order of `features`.
    """

    link: str
    seconds: Mapping[str, tuple[float, ...]]

    def part(self, name: str, work: Work) -> float:
        """Seconds of one part."""
        counts = features(work)[name]
        return sum(cost * n for cost, n in zip(self.seconds[name], counts, strict=True))

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds by part."""
        return {name: self.part(name, work) for name in self.seconds}

    def sync(self, work: Work) -> float:
        """Seconds of a whole sync."""
        return sum(self.parts(work).values())

    def pause(self, work: Work) -> float:
        """Seconds for which an engine is paused."""
        parts = self.parts(work)
        return parts["commit"] + (parts["transfer"] if work.is_in_place else 0.0)
