"""Subsets of segments, written as gaps between ranks: how `class` says which elements changed.

A line of elements is cut into *segments*. Of a segment with N elements n are chosen; both ends
know the two numbers. The ranks of the chosen ones are written, or those of the others if these are
fewer: each as its gap to the one before, by Rice's code. Its parameter follows from N and n, so
that nothing but the gaps is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import InvalidIndices
from deltasync.files.classes.bitstream import FieldReader, Ints, Words
from deltasync.files.classes.streams import UnaryReader

_MAX_PARAMETER = 32


@dataclass(frozen=True, slots=True)
class Segments:
    """How a line is cut, and how much of each part is chosen.

    Attributes:
        sizes: int64[segments], elements.
        chosen: int64[segments], how many of them are chosen.
        written: int64[segments], ranks that are written.
        flipped: bool[segments]: they are those of the elements that are not chosen.
        parameters: int64[segments], how many low bits of a gap are a field.
        begins: int64[segments], where each one begins in the line.
    """

    sizes: Ints
    chosen: Ints
    written: Ints
    flipped: NDArray[np.bool_]
    parameters: Ints
    begins: Ints

    @classmethod
    def of(cls, sizes: Ints, chosen: Ints) -> Segments:
        """Raises InvalidIndices if more elements are chosen than there are."""
        if (chosen > sizes).any():
            raise InvalidIndices("more elements of a class are changed than it has")
        written = np.minimum(chosen, sizes - chosen)
        weighted, limit = 25 * (sizes - written) + 12 * written - 1, 52 * written
        parameters = np.zeros(len(sizes), np.int64)
        for k in range(_MAX_PARAMETER):
            are_longer = (weighted >> k >= limit) & (written > 0)
            if not are_longer.any():  # nor will any be by a larger one
                break
            parameters += are_longer
        begins = np.cumsum(sizes) - sizes
        return cls(sizes, chosen, written, chosen > written, parameters, begins)

    def coded(self, places: Ints) -> tuple[Ints, Words, Ints]:
        """What is written of the chosen places of the line, int64[n], increasing.

        Returns:
            For each rank that is written its gap's quotient, its remainder, and the width of that.
        """
        places = self._flip(places, self.chosen)
        before = np.concatenate([[-1], places[:-1]])
        firsts = (np.cumsum(self.written) - self.written)[self.written > 0]
        before[firsts] = self.begins[self.written > 0] - 1
        gaps, widths = places - before - 1, np.repeat(self.parameters, self.written)
        return gaps >> widths, (gaps & (1 << widths) - 1).astype(np.uint64), widths

    def decoded(self, unary: UnaryReader, fields: FieldReader) -> Ints:
        """int64[n]: the chosen places of the line, increasing. Raises WireError."""
        widths = np.repeat(self.parameters, self.written)
        quotients = unary.take(len(widths))
        if (quotients > (np.repeat(self.sizes, self.written) >> widths)).any():
            raise InvalidIndices("a gap between changed elements is longer than their class")
        gaps = (quotients << widths) + fields.take(widths).astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(gaps + 1)])
        stops = np.cumsum(self.written)
        origins = self.begins - 1 - ends[stops - self.written]
        if (ends[stops] + origins >= self.begins + self.sizes).any():
            raise InvalidIndices("a changed element lies beyond the end of its class")
        return self._flip(ends[1:] + np.repeat(origins, self.written), self.written)

    def _flip(self, places: Ints, counts: Ints) -> Ints:
        """Increasing places of which segments have `counts`: in flipped ones, the other places."""
        if not self.flipped.any():
            return places
        sizes = np.where(self.flipped, self.sizes, 0)
        shifts = self.begins - (np.cumsum(sizes) - sizes)  # of places among flipped segments
        is_flipped = np.repeat(self.flipped, counts)
        others = np.ones(int(sizes.sum()), np.bool_)
        others[(places - np.repeat(shifts, counts))[is_flipped]] = False
        flipped = (np.arange(len(others)) + np.repeat(shifts, sizes))[others]
        return np.sort(np.concatenate([places[~is_flipped], flipped]), kind="stable")
