"""Subsets of segments on a device: their gaps into streams, and back. See `codecs.subsets`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.batched.weights import upload
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.codecs.device_class_lines import Lines
from deltasync.delta.codecs.device_class_tiles import RowTiles, run_flat
from deltasync.delta.codecs.device_tiles import add_up
from deltasync.delta.kernels import triton_class_streams as kernels


def ends_of(counts: Tensor) -> Tensor:
    """Of int64[n] or int64[rows, n]: sums over what lies before each of a row, and over all."""
    ends = torch.nn.functional.pad(counts, (1, 0))
    add_up(ends)
    return ends


def sums_at(sums: Tensor, places: Tensor) -> Tensor:
    """Of inclusive sums over the last axis: those over what lies before each place."""
    return sums[..., places - 1] * (places > 0)  # of 0 the last, times 0


@dataclass(frozen=True, slots=True)
class Subsets:
    """What is chosen of the segments of lines.

    Attributes:
        lines: Which rows the segments belong to.
        sizes: int64[segments], elements of each.
        ends: int64[3, segments + 1], see `triton_class_streams`.
        by_row: int64[3, rows + 1]: `ends` where rows begin.
        of_rows: int64[3, rows]: what is chosen and written of each row, and the bits of its fields.
        limit: The most that may be chosen.
    """

    lines: Lines
    sizes: Tensor
    ends: Tensor
    by_row: Tensor
    of_rows: Tensor
    limit: int

    @classmethod
    def of(cls, lines: Lines, chosen: Tensor, limit: int) -> Subsets:
        """Of int64[segments] how many are chosen, at most as many as there are."""
        number = lines.num_segments
        shapes = torch.empty((3, number), dtype=torch.int64, device=chosen.device)
        run_flat(kernels.shape_segments, number, kernels.FLAT, lines.sizes, chosen, shapes, number)
        ends = ends_of(shapes)
        by_row = ends[:, lines.bounds]
        return cls(lines, lines.sizes, ends, by_row, by_row.diff(dim=1), limit)

    def measured(self, ranks: Tensor) -> Gaps:
        """The gaps of chosen ones with these int32 ranks in their segments."""
        gaps = torch.empty(self.limit, dtype=torch.int32, device=ranks.device)
        unary = torch.empty(self.limit, dtype=torch.int64, device=ranks.device)
        run_flat(
            kernels.measure_gaps, self.limit, kernels.FLAT, self.ends, self.sizes, ranks, gaps,
            unary, self.lines.num_segments, self.limit,
        )  # fmt: skip
        unary.cumsum_(0)
        return Gaps(self, gaps, unary, sums_at(unary, self.by_row[1]).diff())

    def streams(
        self,
        unary: Tensor,
        fields: Tensor,
        numbers: Tensor | None = None,
        stops: Tensor | None = None,
    ) -> Tensor:
        """int64[5, rows], see `triton_class_streams`; the last two are for those that read.

        Args:
            unary, fields, stops: int64[rows], where streams begin, and fields end, in bytes.
            numbers: int64[rows], the first number of each row.
        """
        first = self.lines.bounds[:-1]
        numbers = first if numbers is None else numbers
        stops = fields if stops is None else stops
        return torch.stack([first, numbers, 8 * unary, 8 * fields, 8 * stops])

    def ranks(self, streams: Tensor, ones: Tensor, words: Tensor, errors: Tensor) -> Tensor:
        """int32[limit]: the written ranks that streams have. Lowers `errors`, int64[rows]."""
        steps = torch.empty(self.limit, dtype=torch.int64, device=ones.device)
        rows, segments = len(errors), self.lines.num_segments
        run_flat(
            kernels.read_gaps, self.limit, kernels.FLAT, streams, self.lines.segment_row,
            self.ends, self.sizes, ones, words, steps, errors, rows, segments, self.limit,
        )  # fmt: skip
        ranks = torch.empty(self.limit, dtype=torch.int32, device=ones.device)
        run_flat(
            kernels.rank_gaps, self.limit, kernels.FLAT, self.lines.segment_row, self.ends,
            self.sizes, steps.cumsum_(0), ranks, errors, rows, segments, self.limit,
        )  # fmt: skip
        return ranks


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of subsets, measured.

    Attributes:
        gaps: int32[n].
        unary: int64[n], bits of their unary numbers up to each.
        unary_bits: int64[rows], of each row.
    """

    subsets: Subsets
    gaps: Tensor
    unary: Tensor
    unary_bits: Tensor

    def write(self, streams: Tensor, words: Tensor) -> None:
        """Write them where int64[5, rows] `streams` says: see `triton_class_streams`."""
        of, lines = self.subsets, self.subsets.lines
        run_flat(
            kernels.write_gaps, of.limit, kernels.FLAT, streams, lines.segment_row, of.ends,
            of.sizes, self.gaps, self.unary, words, streams.shape[1], lines.num_segments,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ones:
    """Where the ones of unary streams are.

    Attributes:
        places: int64[n], in bits from the begin of each row's stream, those of a row one after
            another; 0 where a stream has fewer.
        found: int64[rows], how many each stream has.
        left: int64[rows], bits of each behind the last one that was asked for.
    """

    places: Tensor
    found: Tensor
    left: Tensor

    @classmethod
    def of(cls, data: Tensor, num_bytes: Ints, starts: Tensor, wanted: Tensor, limit: int) -> Ones:
        """Find so many in each of the streams.

        Args:
            data: uint8[n].
            num_bytes: int64[rows], of each stream.
            starts: int64[rows], where each begins.
            wanted: int64[rows], together at most `limit`.
        """
        device = data.device
        tiles = RowTiles.of(num_bytes, kernels.ONES, device)
        lengths = upload([num_bytes], device)[0]
        counts = torch.zeros(tiles.number, dtype=torch.int64, device=device)
        tiles.run(kernels.count_ones, data, lengths, starts, counts)
        before, firsts = ends_of(counts), ends_of(wanted)
        places = torch.zeros(limit, dtype=torch.int64, device=device)
        tiles.run(kernels.place_ones, data, lengths, starts, before, wanted, firsts[:-1], places)
        last = places[firsts[1:] - 1]  # of a stream without any, some other
        left = 8 * lengths - torch.where(wanted > 0, last, -1)
        return cls(places, before[tiles.stop] - before[tiles.first], left)
