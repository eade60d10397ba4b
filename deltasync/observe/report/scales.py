"""Where a chart puts things: bins of rows along it, a logarithmic scale up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_LEAST = 1e-15  # smaller values count as 0

Spread = tuple[float, float, float]
"""(least, median, largest) of the values in a bin."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A chart's size, and what is left free around it, in its own units.

    Attributes:
        name: "wide" or "narrow": for which screens.
    """

    name: str
    width: int
    height: int
    left: int
    right: int = 12
    top: int = 10
    bottom: int = 26

    @property
    def inner_width(self) -> int:
        return self.width - self.left - self.right

    @property
    def inner_height(self) -> int:
        return self.height - self.top - self.bottom


@dataclass(frozen=True, slots=True)
class Bins:
    """Rows that share a place along a chart, where there are more rows than places.

    Attributes:
        rows: How many there are.
        number: Of bins; bin i has the rows from `i * rows // number` on.
    """

    rows: int
    number: int

    @classmethod
    def of(cls, rows: int, most: int) -> Bins:
        """One for each row, or `most` of them."""
        return cls(rows, max(1, min(rows, most)))

    def of_row(self, row: int) -> int:
        """The bin of a row; rows that are still to come belong to the last one."""
        row = min(row, self.rows - 1)
        return min(self.number - 1, ((row + 1) * self.number - 1) // self.rows)

    def ends(self, number: int) -> tuple[int, int]:
        """Its first row, and the one after its last."""
        return number * self.rows // self.number, (number + 1) * self.rows // self.number

    def spreads(self, values: Sequence[float | None]) -> list[Spread | None]:
        """What each bin has of the values of rows; None for nothing."""
        found: list[Spread | None] = []
        for number in range(self.number):
            first, end = self.ends(number)
            here = [value for value in values[first:end] if value is not None]
            found.append((min(here), median(here), max(here)) if here else None)
        return found


@dataclass(frozen=True, slots=True)
class LogScale:
    """Values on a logarithmic scale; those below it lie at its lower end."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> LogScale | None:
        """One for these values, of which 0 is not shown; None if there is nothing to show."""
        positive = [value for value in values if value > _LEAST]
        if not positive:
            return None
        low, high = min(positive), max(positive)
        margin = 1.15 if high / low > 3 else 2.0
        return cls(low / margin, high * margin)

    def share(self, value: float) -> float:
        """How far up it lies, from 0 to 1."""
        if value <= self.low:
            return 0.0
        return min(1.0, math.log(value / self.low) / math.log(self.high / self.low))

    def ticks(self, most: int) -> list[float]:
        """Round values to draw lines at: powers of ten, or more if these are few."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = [10.0**power for power in range(first, last + 1)]
        found = self._within(decades)
        for steps in ((1, 2, 5), tuple(range(1, 10))):
            if len(found) < 3:
                found = self._within([step * ten for ten in decades for step in steps])
        return found[:: -(-len(found) // most)]

    def _within(self, values: Sequence[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]


def round_rows(versions: Sequence[int], most: int) -> list[int]:
    """Rows to name along a chart: about so many, of round versions where that is possible."""
    step = 1
    while len(versions) / step > most:
        step = step * 5 // 2 if str(step).startswith("2") else step * 2
    found = [row for row, version in enumerate(versions) if version % step == 0]
    if len(found) > 2 * most or len(found) < min(2, len(versions)):
        found = sorted({round(n * (len(versions) - 1) / (most - 1)) for n in range(most)})
    return found
