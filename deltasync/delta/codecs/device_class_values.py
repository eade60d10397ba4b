"""Value blocks of `class` on a device: see `codecs.class_values`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import Numbers, upload
from deltasync.delta.codecs.class_frequent import most_listed
from deltasync.delta.codecs.class_keys import MAX_CLASSES
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.codecs.device_blocks import order_constants
from deltasync.delta.codecs.device_class_choices import Changes, Choices
from deltasync.delta.codecs.device_class_errors import check, note
from deltasync.delta.codecs.device_class_lines import ONE_LANE, Layout, Lines, key_constants
from deltasync.delta.codecs.device_class_sections import Section
from deltasync.delta.codecs.device_class_subsets import Gaps, Ones, Subsets, ends_of, sums_at
from deltasync.delta.codecs.device_class_tiles import RowTiles, run_flat
from deltasync.delta.codecs.device_tiles import add_up
from deltasync.delta.kernels import triton_class_headers as headers
from deltasync.delta.kernels import triton_class_moves as moves
from deltasync.delta.kernels import triton_class_streams as streams
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.delta.kernels.triton_classes import MOVES
from deltasync.dtypes import Dtype


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Changes longer than one.

    Attributes:
        excess: int64[n], what exceeds 2, or the quotient of that.
        sums: int64[3, n], of all up to each: bits in unary, bits of fields, and how many are long.
        of_rows: int64[3, rows], the sums over rows.
    """

    excess: Tensor
    sums: Tensor
    of_rows: Tensor

    @classmethod
    def of(cls, excess: Tensor, parts: Tensor, ends: Tensor) -> _Lengths:
        """Add up int64[3, n] `parts`, in their memory. ends: int64[rows + 1], where rows begin."""
        add_up(parts)
        return cls(excess, parts, sums_at(parts, ends).diff(dim=1))


@dataclass(frozen=True, slots=True)
class MeasuredValues:
    """Value blocks that are still to be written.

    Attributes:
        lines: The old bits of the changes.
        choices: What was chosen for the rows.
        moves: int64[n], the number of each step by its slot.
        gaps: Between the ranks of changes longer than one.
        lengths: Theirs.
        chosen: int64[rows, 64], how many each class has.
        heads: int64[7, rows], of blocks that each begin at 0.
    """

    lines: Lines
    choices: Choices
    moves: Tensor
    gaps: Gaps
    lengths: _Lengths
    chosen: Tensor
    heads: Tensor
    dtype: Dtype

    @property
    def num_bytes(self) -> Tensor:
        """int64[rows], of each block."""
        escapes = self.lengths.of_rows[2]
        return self.heads[headers.FIELD_BYTES] + escapes * self.dtype.item_size

    def written(self, num_bytes: Ints) -> Tensor:
        """uint8[n]: the blocks, of which the caller knows how long they are."""
        lines, device, rows = self.lines, self.moves.device, len(num_bytes)
        section, subsets = Section.empty(num_bytes, device), self.gaps.subsets
        heads = torch.empty((7, rows), dtype=torch.int64, device=device)
        _write_headers(self, section.data, section.bounds[0], heads, writes=True)
        RowTiles.of(lines.counts, streams.FLAT, device).run(
            moves.write_directions, lines.table, self.moves, heads[headers.COUNTS], section.words
        )
        unary, fields = heads[headers.UNARY], heads[headers.FIELDS]
        self.gaps.write(subsets.streams(unary, fields), section.words)
        tails = torch.stack(
            [
                unary,
                8 * unary + self.gaps.unary_bits,
                8 * fields + subsets.of_rows[2],
                heads[headers.FIELD_BYTES],
            ]
        )
        some = self.lengths
        run_flat(
            moves.write_lengths, subsets.limit, streams.FLAT, lines.table, tails,
            lines.segment_row, subsets.ends, self.choices.parameters, some.excess, *some.sums,
            section.words, section.data, rows, lines.num_segments,
            ITEM=self.dtype.item_size,
        )  # fmt: skip
        return section.data[: int(num_bytes.sum())]


def measured_values(changes: Changes, choices: Choices, num_classes: Ints) -> MeasuredValues:
    """Find how long blocks get. num_classes: int64[rows]."""
    lines = _counted(changes, choices.value, num_classes)
    device, number, segments = changes.old.device, len(changes.old), lines.num_segments
    line_ends = ends_of(lines.sizes)
    numbers = torch.empty(number, dtype=torch.int64, device=device)
    longer = torch.empty(number, dtype=torch.int32, device=device)
    order = order_constants(changes.dtype)
    RowTiles.of(changes.counts, streams.FLAT, device).run(
        moves.code_moves, lines.table, changes.new, changes.old, lines.slots(line_ends),
        choices.listed, choices.num_listed, numbers, longer, **order,
    )  # fmt: skip
    longer.cumsum_(0)
    chosen = torch.empty_like(lines.sizes)
    run_flat(moves.count_chosen, segments, streams.FLAT, line_ends, longer, chosen, segments)
    ranks = torch.empty(number, dtype=torch.int32, device=device)
    excess = torch.empty(number, dtype=torch.int64, device=device)
    run_flat(
        moves.collect_longer, number, streams.FLAT, line_ends, numbers, longer, ranks, excess,
        segments, number, SIGN=order["SIGN"],
    )  # fmt: skip
    subsets = Subsets.of(lines, chosen, number)
    gaps = subsets.measured(ranks)
    lengths = _measured_lengths(subsets, choices.parameters, excess)
    per_class = torch.zeros_like(choices.parameters)
    per_class[lines.segment_row, _kinds(lines)] = chosen
    heads = torch.zeros((7, len(per_class)), dtype=torch.int64, device=device)
    made = MeasuredValues(lines, choices, numbers, gaps, lengths, per_class, heads, changes.dtype)
    _write_headers(made, heads, torch.zeros_like(heads[0]), heads, writes=False)
    return made


def _measured_lengths(subsets: Subsets, parameters: Tensor, excess: Tensor) -> _Lengths:
    lines = subsets.lines
    parts = torch.empty((3, len(excess)), dtype=torch.int64, device=excess.device)
    run_flat(
        moves.measure_lengths, subsets.limit, streams.FLAT, lines.table, lines.segment_row,
        subsets.ends, parameters, excess, *parts, len(parameters), lines.num_segments,
        subsets.limit,
    )  # fmt: skip
    return _Lengths.of(excess, parts, subsets.by_row[0])


def _write_headers(
    made: MeasuredValues, data: Tensor, begins: Tensor, heads: Tensor, *, writes: bool
) -> None:
    choices, rows, subsets = made.choices, len(made.chosen), made.gaps.subsets
    unary, fields, _ = made.lengths.of_rows
    counts = upload([made.lines.counts], begins.device)[0]
    headers.write_value[(rows,)](
        data, counts, begins, choices.num_value, choices.value, choices.num_listed,
        choices.listed, made.chosen, choices.parameters, made.gaps.unary_bits + unary,
        subsets.of_rows[2] + fields, heads, rows,
        KEYS=choices.value.shape[1], ITEM=made.dtype.item_size, WRITE=writes,
    )  # fmt: skip


def _counted(changes: Changes, classes: Tensor, num_classes: Ints) -> Lines:
    """Lines of the changes' old bits."""
    lane_bits = np.full(len(changes.counts), ONE_LANE)
    layout = Layout(changes.addresses, changes.counts, lane_bits, num_classes, changes.counts)
    return Lines.of(layout, classes, changes.dtype, MOVES)


def _kinds(lines: Lines) -> Tensor:
    """int64[segments]: the class of each, of lines of one lane."""
    number = torch.arange(lines.num_segments, device=lines.sizes.device)
    return number - lines.bounds[lines.segment_row]


@dataclass(frozen=True, slots=True)
class ValueBlocks:
    """Value blocks of which the headers have been read.

    Attributes:
        section: The blocks.
        heads: int64[7, rows], see `triton_class_headers`.
        on_host: Its first five rows.
        classes: uint8[rows, keys], of the keys.
        listed: int64[rows, 64], frequent steps.
        chosen, parameters: int64[rows, 64], how many each class has, and its parameter.
        errors: int64[rows], see `triton_class_streams`.
        counts: int64[rows], changes.
    """

    section: Section
    heads: Tensor
    on_host: Ints
    classes: Tensor
    listed: Tensor
    chosen: Tensor
    parameters: Tensor
    errors: Tensor
    counts: Ints
    dtype: Dtype

    @classmethod
    def read(cls, value: Tensor, value_bytes: Ints, counts: Ints, dtype: Dtype) -> ValueBlocks:
        """Read the headers, and wait for them. Raises WireError."""
        section, rows, device = Section.of(value, value_bytes), len(counts), value.device
        heads = torch.empty((7, rows), dtype=torch.int64, device=device)
        keys = key_constants(dtype)["KEYS"]
        classes = torch.empty((rows, keys), dtype=torch.uint8, device=device)
        shape = 3, rows, MAX_CLASSES
        listed, chosen, parameters = torch.zeros(shape, dtype=torch.int64, device=device)
        errors, lengths = torch.empty_like(heads[0]), upload([counts], device)[0]
        headers.read_value[(rows,)](
            section.data, section.bounds, lengths, heads, classes, listed, chosen,
            parameters, errors, rows,
            KEYS=keys, ITEM=dtype.item_size, LISTED=most_listed(dtype),
        )  # fmt: skip
        on_host = Numbers(torch.cat([heads[:5], errors[None]])).read()
        check(on_host[-1])
        return cls(
            section, heads, on_host, classes, listed, chosen, parameters, errors, counts, dtype
        )

    def decoded(self, old: Tensor) -> Tensor:
        """int[n]: the new bits of changes with int[n] old bits, if `errors` are `SOUND` then."""
        changes = Changes(old, old, self.counts, self.dtype)
        lines = _counted(changes, self.classes, self.on_host[headers.CLASSES])
        subsets = Subsets.of(lines, self._chosen(lines), len(old))
        line_ends = ends_of(lines.sizes)
        lengths = self._lengths(subsets, line_ends)
        new = torch.empty_like(old)
        RowTiles.of(self.counts, streams.FLAT, old.device).run(
            moves.decode_moves, lines.table, lines.slots(line_ends), lengths,
            self.heads[headers.COUNTS], self.section.words, self.listed,
            self.heads[headers.SIZE], old, new,
            TYPE=TYPES[self.dtype.item_size], **order_constants(self.dtype),
        )  # fmt: skip
        return new

    def _chosen(self, lines: Lines) -> Tensor:
        """int64[segments]: how many are longer than one; none of rows with more than there are."""
        chosen = self.chosen[lines.segment_row, _kinds(lines)]
        is_many = torch.zeros_like(self.errors)
        is_many.index_add_(0, lines.segment_row, (chosen > lines.sizes).long())
        note(self.errors, is_many > 0, streams.MANY)
        chosen *= (is_many == 0)[lines.segment_row]
        return chosen

    def _lengths(self, subsets: Subsets, line_ends: Tensor) -> Tensor:
        """int64[n]: the length of each change by its slot."""
        heads, errors, rows = self.heads, self.errors, len(self.counts)
        chosen, written, bits = subsets.of_rows
        unary, fields = heads[headers.UNARY], heads[headers.FIELDS]
        stops = fields + heads[headers.FIELD_BYTES]
        wanted = written + chosen
        ones = Ones.of(
            self.section.data, self.on_host[headers.UNARY_BYTES], unary, wanted, 2 * subsets.limit
        )
        note(errors, ones.found < written, streams.ONES_SHORT)
        note(errors, bits > 8 * heads[headers.FIELD_BYTES], streams.FIELDS_SHORT)
        numbers = ends_of(wanted)[:-1]
        places = subsets.streams(unary, fields, numbers, stops)
        ranks = subsets.ranks(places, ones.places, self.section.words, errors)
        tails = torch.stack([numbers + written, 8 * unary, 8 * fields + bits, stops])
        parts = self._quotients(subsets, tails, ones)
        note(errors, ones.found < wanted, streams.LENGTHS_SHORT)
        self._check_rest(subsets, parts, ones, bits)
        lengths = torch.ones(subsets.limit, dtype=torch.int64, device=unary.device)
        run_flat(
            moves.read_lengths, subsets.limit, streams.FLAT, subsets.lines.table, places, tails,
            subsets.lines.segment_row, subsets.ends, line_ends, self.parameters, parts.excess,
            parts.sums[1], parts.sums[2], ranks, self.section.words, self.section.data,
            self.section.bounds[1], lengths, rows, subsets.lines.num_segments,
            ITEM=self.dtype.item_size, STOP=streams.STOP,
        )  # fmt: skip
        return lengths

    def _quotients(self, subsets: Subsets, tails: Tensor, ones: Ones) -> _Lengths:
        """Quotients as excess, and sums of what lengths take."""
        lines = subsets.lines
        shape = 3, subsets.limit
        parts = torch.empty(shape, dtype=torch.int64, device=tails.device)
        run_flat(
            moves.read_quotients, subsets.limit, streams.FLAT, lines.table, tails,
            lines.segment_row, subsets.ends, self.parameters, ones.places, *parts, self.errors,
            len(self.counts), lines.num_segments, subsets.limit,
        )  # fmt: skip
        return _Lengths.of(parts[0].clone(), parts, subsets.by_row[0])

    def _check_rest(self, subsets: Subsets, parts: _Lengths, ones: Ones, gap_bits: Tensor) -> None:
        """Note streams that are too short or too long for the lengths."""
        heads, errors = self.heads, self.errors
        _, bits, escapes = parts.of_rows
        field_bytes = heads[headers.FIELD_BYTES]
        left = 8 * field_bytes - gap_bits - bits
        chosen, written, _ = subsets.of_rows
        note(errors, left < 0, streams.LOW_SHORT)
        note(errors, (ones.found > chosen + written) | (ones.left > 8), streams.ONES_LEFT)
        note(errors, left >= 8, streams.FIELDS_LEFT)
        rest = self.section.bounds[1] - heads[headers.FIELDS] - field_bytes
        note(errors, rest != escapes * self.dtype.item_size, streams.LONG)
