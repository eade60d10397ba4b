"""Index blocks of `class` on a device: see `codecs.class_positions`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.batched.weights import Numbers, upload
from deltasync.delta.codecs.class_keys import MAX_CLASSES
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.codecs.device_class_errors import check, note
from deltasync.delta.codecs.device_class_lines import Layout, Lines, key_constants
from deltasync.delta.codecs.device_class_sections import Section
from deltasync.delta.codecs.device_class_subsets import Gaps, Ones, Subsets
from deltasync.delta.codecs.device_class_tiles import run_flat
from deltasync.delta.kernels import triton_class_headers as headers
from deltasync.delta.kernels import triton_class_streams as streams
from deltasync.delta.kernels.triton_classes import WEIGHTS
from deltasync.dtypes import Dtype

_LANES = 32
"""Lanes whose changes are compared at once."""


@dataclass(frozen=True, slots=True)
class MeasuredIndex:
    """Index blocks that are still to be written.

    Attributes:
        lines: The old bits.
        chosen: int64[segments], how many changes each has.
        least, widths: int64[rows, 64], the least of these of each class, and the bits of the rest.
        gaps: Between the ranks of the changes.
        heads: int64[7, rows], of blocks that each begin at 0.
    """

    lines: Lines
    chosen: Tensor
    least: Tensor
    widths: Tensor
    gaps: Gaps
    heads: Tensor

    @property
    def num_bytes(self) -> Tensor:
        """int64[rows], of each block."""
        return self.heads[headers.FIELDS] + (self.gaps.subsets.of_rows[2] + 7) // 8

    def written(self, num_bytes: Ints) -> Tensor:
        """uint8[n]: the blocks, of which the caller knows how long they are."""
        lines, device = self.lines, self.chosen.device
        section, rows = Section.empty(num_bytes, device), len(num_bytes)
        heads = torch.empty_like(self.heads)
        _write_headers(self, section.data, section.bounds[0], heads, writes=True)
        run_flat(
            headers.write_counts, lines.num_segments, streams.FLAT, lines.table,
            lines.segment_row, self.chosen, self.least, self.widths, heads, section.words, rows,
            lines.num_segments,
        )  # fmt: skip
        places = self.gaps.subsets.streams(heads[headers.UNARY], heads[headers.FIELDS])
        self.gaps.write(places, section.words)
        return section.data[: int(num_bytes.sum())]


def measured_index(indices: Tensor, layout: Layout, classes: Tensor, dtype: Dtype) -> MeasuredIndex:
    """Find how long blocks get.

    Args:
        indices: int32[n], the changes of rows.
        layout: The rows.
        classes: uint8[rows, keys], of the keys.
        dtype: Of the elements.
    """
    lines, device, rows = Lines.of(layout, classes, dtype, WEIGHTS), indices.device, len(classes)
    ranks, chosen = lines.ordered(indices)
    gaps = Subsets.of(lines, chosen, len(indices)).measured(ranks)
    shape = 2, rows, MAX_CLASSES
    least, widths = torch.zeros(shape, dtype=torch.int64, device=device)
    headers.measure_counts[(rows,)](lines.table, chosen, least, widths, rows, TILE=_LANES)
    heads = torch.zeros((7, rows), dtype=torch.int64, device=device)
    made = MeasuredIndex(lines, chosen, least, widths, gaps, heads)
    _write_headers(made, heads, torch.zeros_like(heads[0]), heads, writes=False)
    return made


def _write_headers(
    made: MeasuredIndex, data: Tensor, begins: Tensor, heads: Tensor, *, writes: bool
) -> None:
    lines, rows = made.lines, len(made.least)
    headers.write_index[(rows,)](
        data, lines.table, begins, lines.classes, made.least, made.widths, made.gaps.unary_bits,
        heads, rows, KEYS=lines.classes.shape[1], WRITE=writes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class IndexBlocks:
    """Index blocks of which the headers have been read.

    Attributes:
        section: The blocks.
        heads: int64[7, rows], see `triton_class_headers`.
        on_host: Its first five rows.
        classes: uint8[rows, keys], of the keys.
        least, widths: int64[rows, 64], as those of `MeasuredIndex`.
        errors: int64[rows], see `triton_class_streams`.
    """

    section: Section
    heads: Tensor
    on_host: Ints
    classes: Tensor
    least: Tensor
    widths: Tensor
    errors: Tensor
    spans: Ints
    dtype: Dtype

    @classmethod
    def read(cls, index: Tensor, index_bytes: Ints, spans: Ints, dtype: Dtype) -> IndexBlocks:
        """Read the headers, and wait for them. Raises WireError."""
        section, rows, device = Section.of(index, index_bytes), len(spans), index.device
        heads = torch.empty((7, rows), dtype=torch.int64, device=device)
        keys = key_constants(dtype)["KEYS"]
        classes = torch.empty((rows, keys), dtype=torch.uint8, device=device)
        shape = 2, rows, MAX_CLASSES
        least, widths = torch.zeros(shape, dtype=torch.int64, device=device)
        errors, lengths = torch.empty_like(heads[0]), upload([spans], device)[0]
        headers.read_index[(rows,)](
            section.data, section.bounds, lengths, heads, classes, least, widths, errors, rows,
            KEYS=keys,
        )  # fmt: skip
        on_host = Numbers(torch.cat([heads[:5], errors[None]])).read()
        check(on_host[-1], below=streams.TOTAL)
        return cls(section, heads, on_host, classes, least, widths, errors, spans, dtype)

    def decoded(self, addresses: Ints, counts: Ints) -> Tensor:
        """int32[n]: the positions of so many changes, if `errors` are `SOUND` then."""
        lane_bits, num_classes = self.on_host[headers.SIZE], self.on_host[headers.CLASSES]
        layout = Layout(addresses, self.spans, lane_bits, num_classes, counts)
        lines = Lines.of(layout, self.classes, self.dtype, WEIGHTS)
        limit = int(counts.sum())
        subsets = Subsets.of(lines, self._chosen(lines, counts), limit)
        ranks = self._ranks(subsets)
        return lines.positions(subsets.ends, ranks)

    def _chosen(self, lines: Lines, counts: Ints) -> Tensor:
        """int64[segments]: how many changes each has; none of rows in which something is wrong."""
        chosen, errors = torch.empty_like(lines.sizes), self.errors
        run_flat(
            headers.read_counts, lines.num_segments, streams.FLAT, lines.table, lines.segment_row,
            lines.sizes, self.least, self.widths, self.heads, self.section.words, chosen, errors,
            len(counts), lines.num_segments,
        )  # fmt: skip
        totals = torch.zeros_like(errors).index_add_(0, lines.segment_row, chosen)
        note(errors, totals != upload([counts], errors.device)[0], streams.TOTAL)
        chosen *= (errors == streams.SOUND)[lines.segment_row]
        return chosen

    def _ranks(self, subsets: Subsets) -> Tensor:
        """int32[n]: the written ranks."""
        heads, errors = self.heads, self.errors
        _, written, bits = subsets.of_rows
        unary, fields = heads[headers.UNARY], heads[headers.FIELDS]
        ones = Ones.of(
            self.section.data, self.on_host[headers.UNARY_BYTES], unary, written, subsets.limit
        )
        field_bytes = heads[headers.FIELD_BYTES]
        note(errors, ones.found < written, streams.ONES_SHORT)
        note(errors, bits > 8 * field_bytes, streams.FIELDS_SHORT)
        places = subsets.streams(unary, fields, subsets.by_row[1, :-1], fields + field_bytes)
        ranks = subsets.ranks(places, ones.places, self.section.words, errors)
        note(errors, (ones.found > written) | (ones.left > 8), streams.ONES_LEFT)
        note(errors, 8 * field_bytes - bits >= 8, streams.FIELDS_LEFT)
        return ranks
