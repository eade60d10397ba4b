"""Kernels in Triton for the value blocks of `class`: numbers of steps, their lengths, and back.

A *slot* is a change's place in the order of row, class and position. `tails` is int64[4, rows], a
column of what the names below say: how the lengths of a row follow its gaps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.codecs.class_frequent import MOST
from deltasync.delta.codecs.class_values import ESCAPE
from deltasync.delta.kernels.triton_class_streams import QUOTIENT, get, number_at, of_stream, put
from deltasync.delta.kernels.triton_classes import (
    CHANGE,
    CLASSES,
    COUNT,
    SEGMENT,
    key_of,
    of_line,
    rank_at,
    segment_of,
)
from deltasync.delta.kernels.triton_codecs import stepped_by, zigzag_of

NUMBERS, UNARY, FIELDS, ESCAPES = range(4)
"""Columns of `tails`: the first number in unary among those of all rows; where the lengths begin in
bits, and their fields; where the long lengths begin, in bytes."""

_CHANGE, _COUNT = tl.constexpr(CHANGE), tl.constexpr(COUNT)
_CLASSES, _SEGMENT = tl.constexpr(CLASSES), tl.constexpr(SEGMENT)
_NUMBERS, _UNARY, _FIELDS = tl.constexpr(NUMBERS), tl.constexpr(UNARY), tl.constexpr(FIELDS)
_ESCAPES, _ESCAPE, _QUOTIENT = tl.constexpr(ESCAPES), tl.constexpr(ESCAPE), tl.constexpr(QUOTIENT)
_MOST = tl.constexpr(MOST)


@triton.jit
def _number_of(zigzag, listed, count):
    """uint64: the numbers of steps, of which a row lists `count`."""
    number = zigzag
    if count > 0:
        number = zigzag + (count + 1).to(tl.uint64)
        place = tl.zeros_like(count)
        while place < count:
            step = tl.load(listed + place).to(tl.uint64, bitcast=True)
            place += 1
            number = tl.where(zigzag == step, place.to(tl.uint64), number)
    return number


@triton.jit
def _length_of(number, SIGN: tl.constexpr):
    """uint64: how far numbers go; to stay goes all the way around."""
    length = (number >> 1) + (number & 1)
    return tl.where(number == 0, SIGN, length).to(tl.uint64)


@triton.jit
def bit_length(number):
    """int32: bits of uint64 numbers."""
    length = tl.zeros(number.shape, tl.int32)
    for step in tl.static_range(6):
        half = 32 >> step
        is_over = (number >> half) > 0
        length += tl.where(is_over, half, 0)
        number = tl.where(is_over, number >> half, number)
    return length + (number > 0).to(tl.int32)


@triton.jit
def _changes_of(lines, tile_row, tile_first, num_rows, TILE: tl.constexpr):
    """The row of a program, its changes in the row, where they lie, and which are there."""
    tile = tl.program_id(0)
    row = tl.load(tile_row + tile)
    lane = (tile - tl.load(tile_first + row)) * TILE + tl.arange(0, TILE)
    at = of_line(lines, _CHANGE, row, num_rows) + lane
    return row, lane, at, lane < of_line(lines, _COUNT, row, num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def count_lengths(
    pieces, piece_row, new, old, listed, num_listed, windows, found, num_rows,
    KEY_AT: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, SIGN: tl.constexpr,
    ORDER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count how long the moves of a piece of each program are: int32[rows, 64, 64], which were 0.

    By key, from int64[rows] `windows` on, and 0 for 1, or else 1 and the bits of what exceeds 2.

    pieces: int64[4, rows], as those of `count_keys`, but for places in `new` and `old`.
    """
    piece = tl.program_id(0)
    row = tl.load(piece_row + piece)
    begin = (piece - tl.load(pieces + 3 * num_rows + row)) * tl.load(pieces + 2 * num_rows + row)
    lane = begin + tl.arange(0, TILE)
    there = lane < tl.load(pieces + num_rows + row)
    at = tl.load(pieces + row) + lane
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    after = tl.load(new + at, mask=there, other=0).to(tl.uint64) & MASK
    zigzag = zigzag_of(after, before, MASK, SIGN, ORDER)
    number = _number_of(zigzag, listed + row * _MOST, tl.load(num_listed + row))
    length = _length_of(number, SIGN)
    key = key_of(before, KEY_AT, KEYS) - tl.load(windows + row)
    kind = tl.minimum(tl.maximum(key, 0), 63)
    bits = tl.where(length > 1, tl.minimum(1 + bit_length(length - 2), 63), 0)
    tl.atomic_add(found + row * 4096 + kind * 64 + bits, 1, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def code_moves(
    lines, tile_row, tile_first, new, old, slots, listed, num_listed, moves, longer, num_rows,
    MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """By slot: the number of each step, int64, and whether it is longer than 1, int32."""
    row, _, at, there = _changes_of(lines, tile_row, tile_first, num_rows, TILE)
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    after = tl.load(new + at, mask=there, other=0).to(tl.uint64) & MASK
    zigzag = zigzag_of(after, before, MASK, SIGN, ORDER)
    number = _number_of(zigzag, listed + row * _MOST, tl.load(num_listed + row))
    slot = tl.load(slots + at, mask=there, other=0)
    tl.store(moves + slot, number.to(tl.int64, bitcast=True), mask=there)
    is_longer = _length_of(number, SIGN) > 1
    tl.store(longer + slot, is_longer.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["num_segments"])
def count_chosen(line_ends, longer, chosen, num_segments, TILE: tl.constexpr):
    """How many of each segment are longer than 1, int64. longer: int32, of all up to each slot."""
    segment = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = segment < num_segments
    first = tl.load(line_ends + segment, mask=there, other=0)
    last = tl.load(line_ends + segment + 1, mask=there, other=0)
    count = tl.load(longer + last - 1, mask=there & (last > 0), other=0)
    count -= tl.load(longer + first - 1, mask=there & (first > 0), other=0)
    tl.store(chosen + segment, count.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["num_segments", "limit"])
def collect_longer(
    line_ends, moves, longer, places, excess, num_segments, limit, SIGN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of those longer than 1: their ranks in their segments, int32, and what exceeds 2, int64."""
    slot = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = slot < limit
    length = _length_of(
        tl.load(moves + slot, mask=there, other=1).to(tl.uint64, bitcast=True), SIGN
    )
    chosen = there & (length > 1)
    number = tl.load(longer + slot, mask=chosen, other=1) - 1
    segment = segment_of(line_ends, slot, num_segments, there)
    rank = slot - tl.load(line_ends + segment, mask=chosen, other=0)
    tl.store(places + number, rank.to(tl.int32), mask=chosen)
    tl.store(excess + number, (length - 2).to(tl.int64, bitcast=True), mask=chosen)


@triton.jit
def _chosen_of(lines, segment_row, ends, parameters, number, there, num_rows, num_segments):
    """Of numbers of chosen ones: their segments, rows, the first of the row, and the parameter."""
    segment = segment_of(ends, number, num_segments, there)
    row = tl.load(segment_row + segment, mask=there, other=0)
    line = of_line(lines, _SEGMENT, row, num_rows)
    first = tl.load(ends + line, mask=there, other=0)
    kind = tl.maximum(segment - line, 0)
    parameter = tl.load(parameters + row * 64 + kind, mask=there, other=0)
    return segment, row, first, parameter


@triton.jit(do_not_specialize=["num_rows", "num_segments", "limit"])
def measure_lengths(
    lines, segment_row, ends, parameters, excess, lengths, widths, escapes,
    num_rows, num_segments, limit, TILE: tl.constexpr,
):  # fmt: skip
    """int64, 0 beyond the last: bits in unary, bits of the field, and whether it is long."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + num_segments)
    _, _, _, parameter = _chosen_of(
        lines, segment_row, ends, parameters, number, there, num_rows, num_segments
    )
    over = tl.load(excess + number, mask=there, other=0).to(tl.uint64, bitcast=True)
    over = over >> parameter.to(tl.uint64)
    is_long = there & (over >= _ESCAPE)
    length = tl.where(is_long, _ESCAPE, over.to(tl.int64)) + 1
    is_inside = number < limit
    tl.store(lengths + number, tl.where(there, length, 0), mask=is_inside)
    tl.store(widths + number, tl.where(there & ~is_long, parameter, 0), mask=is_inside)
    tl.store(escapes + number, is_long.to(tl.int64), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def write_lengths(
    lines, tails, segment_row, ends, parameters, excess, lengths, widths, escapes, words, data,
    num_rows, num_segments, ITEM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write what `measure_lengths` found. lengths, widths, escapes: sums of all up to each."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + num_segments)
    _, row, first, parameter = _chosen_of(
        lines, segment_row, ends, parameters, number, there, num_rows, num_segments
    )
    has_before = there & (first > 0)
    at = of_stream(tails, _UNARY, row, num_rows, there) - 1
    at += tl.load(lengths + number, mask=there, other=0)
    at -= tl.load(lengths + first - 1, mask=has_before, other=0)
    put(words, at, tl.full(at.shape, 1, tl.uint64), there)
    above = tl.load(excess + number, mask=there, other=0).to(tl.uint64, bitcast=True)
    is_long = there & ((above >> parameter.to(tl.uint64)) >= _ESCAPE)
    low = above & ((tl.full(at.shape, 1, tl.uint64) << parameter.to(tl.uint64)) - 1)
    at = of_stream(tails, _FIELDS, row, num_rows, there) - parameter
    at += tl.load(widths + number, mask=there, other=0)
    at -= tl.load(widths + first - 1, mask=has_before, other=0)
    put(words, at, low, there & ~is_long & (low > 0))
    at = tl.load(escapes + number, mask=there, other=0) - 1
    at -= tl.load(escapes + first - 1, mask=has_before, other=0)
    byte = data + of_stream(tails, _ESCAPES, row, num_rows, there) + at * ITEM
    for n in tl.static_range(ITEM):
        tl.store(byte + n, ((above >> (8 * n)) & 0xFF).to(tl.uint8), mask=is_long)


@triton.jit(do_not_specialize=["num_rows"])
def write_directions(
    lines, tile_row, tile_first, moves, begins, words, num_rows, TILE: tl.constexpr
):  # fmt: skip
    """Write the direction bits of a row. begins: int64[rows], where they begin, in bytes."""
    tile = tl.program_id(0)
    row = tl.load(tile_row + tile)
    group = (tile - tl.load(tile_first + row)) * (TILE // 32) + tl.arange(0, TILE // 32)
    bit = tl.arange(0, 32)[None, :]
    slot = group[:, None] * 32 + bit
    there = slot < of_line(lines, _COUNT, row, num_rows)
    at = of_line(lines, _CHANGE, row, num_rows) + slot
    move = tl.load(moves + at, mask=there, other=0) & 1
    word = tl.sum(move << bit, axis=1)
    put(words, 8 * tl.load(begins + row) + group * 32, word.to(tl.uint64), word > 0)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "limit"])
def read_quotients(
    lines, tails, segment_row, ends, parameters, ones, quotients, widths, escapes, errors,
    num_rows, num_segments, limit, TILE: tl.constexpr,
):  # fmt: skip
    """int64, 0 beyond the last: quotients of lengths, bits of fields, and which are long."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + num_segments)
    _, row, first, parameter = _chosen_of(
        lines, segment_row, ends, parameters, number, there, num_rows, num_segments
    )
    written = ends + num_segments + 1
    line = of_line(lines, _SEGMENT, row, num_rows)
    last = line + of_line(lines, _CLASSES, row, num_rows)
    gaps = tl.load(written + last, mask=there, other=0)
    gaps -= tl.load(written + line, mask=there, other=0)
    inside = number - first
    at = of_stream(tails, _NUMBERS, row, num_rows, there) + inside
    quotient = number_at(ones, at, gaps + inside, there)
    is_bad = there & (quotient > _ESCAPE)
    code = tl.full(row.shape, _QUOTIENT, tl.int64)
    tl.atomic_min(errors + row, code, mask=is_bad, sem="relaxed")
    quotient = tl.minimum(quotient, _ESCAPE)
    is_long = there & (quotient == _ESCAPE)
    is_inside = number < limit
    tl.store(quotients + number, tl.where(there, quotient, 0), mask=is_inside)
    tl.store(widths + number, tl.where(there & ~is_long, parameter, 0), mask=is_inside)
    tl.store(escapes + number, is_long.to(tl.int64), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def read_lengths(
    lines, streams, tails, segment_row, ends, line_ends, parameters, quotients, widths, escapes,
    ranks, words, data, stops, lengths, num_rows, num_segments, ITEM: tl.constexpr,
    STOP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the lengths, int64, of changes longer than 1, by slot.

    ranks: int32, the written ones. stops: int64[rows], where blocks end, in bytes.
    """
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + num_segments)
    segment, row, first, parameter = _chosen_of(
        lines, segment_row, ends, parameters, number, there, num_rows, num_segments
    )
    has_before = there & (first > 0)
    quotient = tl.load(quotients + number, mask=there, other=0)
    is_long = there & (quotient == _ESCAPE)
    width = tl.where(is_long, 0, parameter)
    at = of_stream(tails, _FIELDS, row, num_rows, there) - width
    at += tl.load(widths + number, mask=there, other=0)
    at -= tl.load(widths + first - 1, mask=has_before, other=0)
    is_inside = there & (at + width <= of_stream(streams, STOP, row, num_rows, there))
    above = get(words, at, width, is_inside)
    above += quotient.to(tl.uint64) << width.to(tl.uint64)
    at = tl.load(escapes + number, mask=there, other=0) - 1
    at -= tl.load(escapes + first - 1, mask=has_before, other=0)
    at = of_stream(tails, _ESCAPES, row, num_rows, there) + at * ITEM
    is_inside = is_long & (at + ITEM <= tl.load(stops + row))
    far = tl.zeros(at.shape, tl.uint64)
    for n in tl.static_range(ITEM):
        byte = tl.load(data + at + n, mask=is_inside, other=0).to(tl.uint64)
        far |= byte << (8 * n)
    above = tl.where(is_long, far, above) + 2
    chosen = tl.load(ends + segment, mask=there, other=0)
    listed = tl.load(ends + segment + 1, mask=there, other=0) - chosen
    written = ends + num_segments + 1 + segment
    begin = tl.load(written, mask=there, other=0)
    count = tl.load(written + 1, mask=there, other=0) - begin
    rank = rank_at(ranks, begin, count, number - chosen, listed > count, there)
    size = tl.load(line_ends + segment + 1, mask=there, other=1)
    slot = tl.load(line_ends + segment, mask=there, other=0) + rank
    slot = tl.minimum(slot, size - 1)
    tl.store(lengths + slot, above.to(tl.int64, bitcast=True), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def decode_moves(
    lines, tile_row, tile_first, slots, lengths, begins, words, listed, num_listed, old, new,
    num_rows, MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The new bits of changes. begins: int64[rows], where direction bits begin, in bytes."""
    row, _, at, there = _changes_of(lines, tile_row, tile_first, num_rows, TILE)
    slot = tl.load(slots + at, mask=there, other=0).to(tl.int64)
    length = tl.load(lengths + slot, mask=there, other=1).to(tl.uint64, bitcast=True)
    place = 8 * tl.load(begins + row) + slot - of_line(lines, _CHANGE, row, num_rows)
    number = (length << 1) - get(words, place, tl.full(place.shape, 1, tl.int64), there)
    count = tl.load(num_listed + row).to(tl.uint64)
    step = number
    if count > 0:
        step = number - (count + 1)
        is_listed = there & (number <= count)
        entry = listed + row * _MOST + tl.maximum(number.to(tl.int64), 1) - 1
        found = tl.load(entry, mask=is_listed, other=0).to(tl.uint64, bitcast=True)
        step = tl.where(is_listed, found, step)
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    after = stepped_by(step & MASK, before, MASK, SIGN, ORDER)
    tl.store(new + at, after.to(TYPE), mask=there)
