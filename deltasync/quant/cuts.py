"""Matrices of which a rank holds a box: blocks that cross its borders, and what is quantized there.

A block's codes and scale depend on its largest magnitude alone. So a box is quantized in a band
that has zeros where other ranks hold the elements of a block, and the largest magnitude of the
whole block, on which all have agreed, at one of these places. No form has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltasync.delta.shard import ShardSpec
from deltasync.errors import ConfigError
from deltasync.quant.form import Form, Part
from deltasync.quant.rounding import largest

Line = tuple[int, int]
"""(dim, number): a row of blocks, where dim is 0, or a column of them."""

Rows = Callable[[int, int], Tensor]
"""Reads [stop - start, cols] bfloat16, the rows from start to stop of what is held."""


@dataclass(frozen=True, slots=True)
class Span:
    """Which rows, or columns, of a matrix are held.

    Attributes:
        full: How many the matrix has.
        begin, end: Those that are held.
        block: How many are a block.
    """

    full: int
    begin: int
    end: int
    block: int

    @property
    def blocks(self) -> range:
        """The blocks of which something is held."""
        return range(self.begin // self.block, -(-self.end // self.block))

    @property
    def cut(self) -> list[int]:
        """Those that other ranks hold a part of."""
        ends = (self.end,) if self.end < self.full else ()
        return sorted({at // self.block for at in (self.begin, *ends) if at % self.block})

    @property
    def all_blocks(self) -> int:
        """How many blocks the matrix has."""
        return -(-self.full // self.block)

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """What is held of a range."""
        return max(begin, self.begin), max(min(end, self.end), self.begin)

    def beginning(self, step: int) -> range:
        """Which runs of `step` begin in what is held."""
        return range(-(-self.begin // step), -(-self.end // step))


class Cut:
    """A box of a matrix.

    Attributes:
        rows, cols: What is held.
    """

    def __init__(self, held: ShardSpec, form: Form) -> None:
        """Raises ConfigError for a box whose codes are not its own."""
        (height, width), (top, left), (rows, cols) = held.shape, held.offset, held.size
        self.rows = Span(height, top, top + rows, form.rows)
        self.cols = Span(width, left, left + cols, form.cols or width)
        self._form = form
        self._full = form.parts((height, width))
        self._step = next(iter(self._full.values())).cols
        if any(at % self._step and at < width for at in (left, left + cols)):
            raise ConfigError(
                f"this rank holds {held.size} at {held.offset} of {held.shape}, and {form.name} "
                f"has the codes of {self._step} columns in one element: let borders of ranks be at "
                "multiples of that"
            )
        self._peaks: dict[Line, Tensor] = {}

    @property
    def lines(self) -> list[Line]:
        """The rows and columns of blocks that cross borders."""
        return [(0, number) for number in self.rows.cut] + [(1, n) for n in self.cols.cut]

    def along(self, line: Line) -> Span:
        """Where a row of blocks has its columns, or a column of blocks its rows."""
        return self.rows if line[0] else self.cols

    def shards(self) -> Iterator[tuple[str, Part, ShardSpec]]:
        """(suffix, part, where it lies): each part of the matrix, and what is made of it here.

        An element of a part is made by the rank that holds the first element that it stands for.
        What is of the whole matrix is made by each.
        """
        for suffix, part in self._full.items():
            if part.rows is None:
                yield suffix, part, ShardSpec.whole(part.shape)
                continue
            made = self.rows.beginning(part.rows), self.cols.beginning(part.cols)
            offset, size = (made[0].start, made[1].start), (len(made[0]), len(made[1]))
            yield suffix, part, ShardSpec(part.shape, offset, size)

    def peaks(self, line: Line, read: Rows) -> Tensor:
        """bfloat16[blocks]: the largest magnitudes of what is held of the blocks of a line."""
        dim, number = line
        span, other = (self.rows, self.cols)[dim], self.along(line)
        begin, end = span.within(number * span.block, (number + 1) * span.block)
        low, high = begin - span.begin, end - span.begin
        held = read(low, high) if dim == 0 else read(0, self.rows.end - self.rows.begin)
        held = held if dim == 0 else held[:, low:high]
        across = largest(held, dim).flatten()
        first, count = other.begin - other.blocks.start * other.block, len(other.blocks)
        spread = pad(across, (first, count * other.block - first - len(across)))
        return largest(spread.view(count, other.block), 1).flatten()

    def agree(self, line: Line, peaks: Tensor) -> None:
        """Take the largest magnitudes of whole blocks: bfloat16[blocks] of a line, not owned."""
        peaks = self._peaks[line] = peaks.clone()
        dim, number = line
        at = number - (self.rows, self.cols)[dim].blocks.start
        for other in (self.cols, self.rows)[dim].cut:
            crossing = self._peaks.get((1 - dim, other))
            if crossing is not None:  # the block where they cross
                there = other - self.along(line).blocks.start
                peaks[there] = crossing[at] = torch.maximum(peaks[there], crossing[at])

    def forget(self) -> None:
        """The trainer has made a step."""
        self._peaks.clear()

    def rows_of(
        self, suffix: str, start: int, stop: int, read: Rows, whole: Mapping[str, Tensor]
    ) -> Tensor:
        """[stop - start, ...]: rows of what is made here of a part.

        Args:
            suffix: The part.
            start, stop: Which of the rows that are made here.
            read: Reads what is held.
            whole: What `Form.whole` has returned.

        Raises ConfigError if ranks have not agreed on what this takes.
        """
        part, block = self._full[suffix], self._form.rows
        assert part.rows is not None
        if lacking := set(self.lines) - self._peaks.keys():
            raise ConfigError(f"ranks have not agreed on {len(lacking)} rows or columns of blocks")
        made, cols = self.rows.beginning(part.rows).start, self.cols.beginning(part.cols)
        first = (made + start) * part.rows // block * block
        last = min(-(-(made + stop) * part.rows // block) * block, self.rows.full)
        before = self._beside()[0]
        found = self._form.quantize(self._band(first, last, read), whole)[suffix]
        begin = made + start - first // part.rows
        if self._form.cols is None:
            skip = before // part.cols
        else:
            skip = cols.start - (self.cols.begin - before) // part.cols
        return found[begin : begin + stop - start, skip : skip + len(cols)]

    def _beside(self) -> tuple[int, int]:
        """How many columns a band has before and after those that are held."""
        cols = self.cols
        if self._form.cols is None:  # a place for the largest magnitude is enough
            return (self._step if cols.cut else 0), 0
        return cols.begin % cols.block, min(-cols.end % cols.block, cols.full - cols.end)

    def _band(self, first: int, last: int, read: Rows) -> Tensor:
        """[last - first, ...] bfloat16: rows of whole blocks, with what others hold set to 0."""
        rows, cols, (before, after) = self.rows, self.cols, self._beside()
        begin, end = rows.within(first, last)
        held = read(begin - rows.begin, end - rows.begin)
        band = pad(held, (before, after, begin - first, last - end))
        if begin > first:
            band[0, :: cols.block] = self._peaks[0, first // rows.block]
        if end < last:
            band[-1, :: cols.block] = self._peaks[0, rows.end // rows.block]
        here = slice(first // rows.block - rows.blocks.start, None)
        if before:
            peaks = self._peaks[1, cols.begin // cols.block][here]
            band[:: rows.block, 0] = peaks[: -(-len(band) // rows.block)]
        if after:
            peaks = self._peaks[1, cols.end // cols.block][here]
            band[:: rows.block, -1] = peaks[: -(-len(band) // rows.block)]
        return band
