"""Kernels in Triton for the streams of `class`: gaps between ranks in unary numbers and fields.

What is chosen of all segments lies one after another, and so does what is written of them: see
`codecs.subsets`. `ends` is int64[3, segments + 1]: where the chosen ones of each segment begin, the
written ones, and the bits of their fields. A place in a stream is a number of bits from the begin
of int32 `words`. `streams` is int64[5, rows], a column of what the names below say.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels.triton_base import popcount
from deltasync.delta.kernels.triton_classes import rank_at, segment_of

FIRST, NUMBER, UNARY, FIELDS, STOP = range(5)
"""Columns of `streams`: the row's first segment; its first number in unary among those of all rows;
where its unary stream begins, its fields begin, and these end."""

FLAT = 1024
"""Numbers that one program works on."""

ONES = 512
"""Bytes of a unary stream that one program takes apart."""

SHORT, WRONG, TOTAL, STREAM, MANY, ONES_SHORT, GAP, FIELDS_SHORT, END = range(1, 10)
LENGTHS_SHORT, QUOTIENT, LOW_SHORT, ONES_LEFT, FIELDS_LEFT, LONG = range(10, 16)
"""What is wrong with a row: the lower it is, the earlier it is found by numpy."""

SOUND = 16
"""Nothing is wrong."""

_FIRST, _NUMBER, _UNARY = tl.constexpr(FIRST), tl.constexpr(NUMBER), tl.constexpr(UNARY)
_FIELDS, _STOP = tl.constexpr(FIELDS), tl.constexpr(STOP)
_GAP, _END = tl.constexpr(GAP), tl.constexpr(END)


@triton.jit
def put(words, at, number, there):
    """Write uint64 numbers of less than 57 bits from bits on that are 0."""
    word, shift = words + (at >> 5), (at & 31).to(tl.uint64)
    low = (number << shift) & 0xFFFFFFFF
    middle = (number >> (32 - shift)) & 0xFFFFFFFF
    high = (number >> 1) >> (63 - shift)
    tl.atomic_or(word, low.to(tl.uint32).to(tl.int32, bitcast=True), mask=there, sem="relaxed")
    some = there & (middle != 0)
    part = middle.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(word + 1, part, mask=some, sem="relaxed")
    some = there & (high != 0)
    part = high.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(word + 2, part, mask=some, sem="relaxed")


@triton.jit
def get(words, at, width, there):
    """uint64: fields of up to 56 bits. Words after the last bit are there."""
    word, shift = words + (at >> 5), (at & 31).to(tl.uint64)
    low = tl.load(word, mask=there, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    middle = tl.load(word + 1, mask=there, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(word + 2, mask=there, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    number = ((low | (middle << 32)) >> shift) | ((high << 1) << (63 - shift))
    mask = (tl.full(number.shape, 1, tl.uint64) << width.to(tl.uint64)) - 1
    return tl.where(there, number & mask, 0)


@triton.jit
def of_stream(streams, column: tl.constexpr, row, num_rows, there):
    """What a column says."""
    return tl.load(streams + column * num_rows + row, mask=there, other=0)


@triton.jit(do_not_specialize=["num_segments"])
def shape_segments(sizes, chosen, shapes, num_segments, TILE: tl.constexpr):
    """int64[3, segments]: what is chosen and written of each segment, and the bits of its fields.

    sizes, chosen: int64[segments].
    """
    segment = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = segment < num_segments
    size = tl.load(sizes + segment, mask=there, other=0)
    count = tl.load(chosen + segment, mask=there, other=0)
    written = tl.minimum(count, size - count)
    width = gap_width(size, written)
    tl.store(shapes + segment, count, mask=there)
    tl.store(shapes + num_segments + segment, written, mask=there)
    tl.store(shapes + 2 * num_segments + segment, written * width, mask=there)


@triton.jit
def gap_width(size, written):
    """Bits of the fields of a segment: the least k of docs/wire-format.md, section 4."""
    weighted, limit = 25 * (size - written) + 12 * written, 52 * written
    width = tl.zeros_like(size)
    for k in tl.static_range(32):
        width += ((written > 0) & (((weighted - 1) >> k) >= limit)).to(tl.int64)
    return width


@triton.jit
def _written_of(ends, sizes, number, num_segments, there):
    """Of numbers of written ones: segment, where it begins, how many, its size and field width."""
    written = ends + num_segments + 1
    segment = segment_of(written, number, num_segments, there)
    first = tl.load(written + segment, mask=there, other=0)
    count = tl.load(written + segment + 1, mask=there, other=0) - first
    size = tl.load(sizes + segment, mask=there, other=0)
    return segment, first, count, size, gap_width(size, count)


@triton.jit(do_not_specialize=["num_segments", "limit"])
def measure_gaps(ends, sizes, ranks, gaps, lengths, num_segments, limit, TILE: tl.constexpr):
    """The gap, int32, of each written one, and the bits it has in unary, int64; 0 beyond the last.

    ranks: int32, of the chosen ones in their segments.
    """
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + 2 * num_segments + 1)
    segment, first, count, _, width = _written_of(ends, sizes, number, num_segments, there)
    chosen = tl.load(ends + segment, mask=there, other=0)
    listed = tl.load(ends + segment + 1, mask=there, other=0) - chosen
    flipped, inside = listed > count, number - first
    rank = rank_at(ranks, chosen, listed, inside, flipped, there)
    has_one = there & (inside > 0)
    before = rank_at(ranks, chosen, listed, inside - 1, flipped, has_one)
    gap = rank - tl.where(has_one, before, -1) - 1
    tl.store(gaps + number, gap.to(tl.int32), mask=there)
    tl.store(lengths + number, tl.where(there, (gap >> width) + 1, 0), mask=number < limit)


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def write_gaps(
    streams, segment_row, ends, sizes, gaps, unary, words, num_rows, num_segments,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write what `measure_gaps` found. unary: int64, the bits of all gaps up to each."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + 2 * num_segments + 1)
    segment, first, _, _, width = _written_of(ends, sizes, number, num_segments, there)
    row = tl.load(segment_row + segment, mask=there, other=0)
    line = of_stream(streams, _FIRST, row, num_rows, there)
    begin = tl.load(ends + num_segments + 1 + line, mask=there, other=0)
    passed = tl.load(unary + begin - 1, mask=there & (begin > 0), other=0)
    at = of_stream(streams, _UNARY, row, num_rows, there) - passed
    at += tl.load(unary + number, mask=there, other=0) - 1
    put(words, at, tl.full(at.shape, 1, tl.uint64), there)
    gap = tl.load(gaps + number, mask=there, other=0).to(tl.uint64)
    low = gap & ((tl.full(at.shape, 1, tl.uint64) << width.to(tl.uint64)) - 1)
    bits = ends + 2 * (num_segments + 1)
    at = of_stream(streams, _FIELDS, row, num_rows, there) + (number - first) * width
    at += tl.load(bits + segment, mask=there, other=0) - tl.load(bits + line, mask=there, other=0)
    put(words, at, low, there & (low > 0))


@triton.jit(do_not_specialize=["num_rows"])
def count_ones(data, tile_row, tile_first, lengths, starts, counts, num_rows, TILE: tl.constexpr):
    """Ones in a tile of a unary stream, int64. lengths, starts: int64[rows], bytes in `data`."""
    byte, _ = _bytes_of(data, tile_row, tile_first, lengths, starts, TILE)
    tl.store(counts + tl.program_id(0), tl.sum(popcount(byte.to(tl.uint32)).to(tl.int64)))


@triton.jit
def _bytes_of(data, tile_row, tile_first, lengths, starts, TILE: tl.constexpr):
    tile = tl.program_id(0)
    row = tl.load(tile_row + tile)
    at = (tile - tl.load(tile_first + row)) * TILE + tl.arange(0, TILE)
    there = at < tl.load(lengths + row)
    return tl.load(data + tl.load(starts + row) + at, mask=there, other=0), at


@triton.jit(do_not_specialize=["num_rows"])
def place_ones(
    data, tile_row, tile_first, lengths, starts, before, wanted, firsts, ones, num_rows,
    TILE: tl.constexpr,
):  # fmt: skip
    """Where the ones of a row's unary stream are, int64, in bits from its begin.

    before: int64[tiles], ones of all tiles before. wanted, firsts: int64[rows], how many are asked
    for, and where they go.
    """
    byte, at = _bytes_of(data, tile_row, tile_first, lengths, starts, TILE)
    row = tl.load(tile_row + tl.program_id(0))
    first = tl.load(before + tl.program_id(0)) - tl.load(before + tl.load(tile_first + row))
    byte = byte.to(tl.uint32)
    found = popcount(byte)
    first += tl.cumsum(found, axis=0) - found
    bit = tl.arange(0, 8)[None, :]
    lower = (tl.full([1, 8], 1, tl.uint32) << bit.to(tl.uint32)) - 1
    number = first[:, None] + popcount(byte[:, None] & lower)
    is_one = ((byte[:, None] >> bit.to(tl.uint32)) & 1) != 0
    there = is_one & (number < tl.load(wanted + row))
    tl.store(ones + tl.load(firsts + row) + number, 8 * at[:, None] + bit, mask=there)


@triton.jit
def number_at(ones, at, inside, there):
    """The numbers in unary that end at ones; `inside`: their numbers in the row."""
    end = tl.load(ones + at, mask=there, other=0)
    before = tl.load(ones + at - 1, mask=there & (inside > 0), other=-1)
    return tl.maximum(end - tl.where(inside > 0, before, -1) - 1, 0)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "limit"])
def read_gaps(
    streams, segment_row, ends, sizes, ones, words, steps, errors, num_rows, num_segments, limit,
    TILE: tl.constexpr,
):  # fmt: skip
    """How far each written rank is from the one before, int64; 0 beyond the last."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + 2 * num_segments + 1)
    segment, first, _, size, width = _written_of(ends, sizes, number, num_segments, there)
    row = tl.load(segment_row + segment, mask=there, other=0)
    line = of_stream(streams, _FIRST, row, num_rows, there)
    inside = number - tl.load(ends + num_segments + 1 + line, mask=there, other=0)
    at = of_stream(streams, _NUMBER, row, num_rows, there) + inside
    quotient = number_at(ones, at, inside, there)
    is_bad = there & (quotient > (size >> width))
    tl.atomic_min(errors + row, tl.full(row.shape, _GAP, tl.int64), mask=is_bad, sem="relaxed")
    bits = ends + 2 * (num_segments + 1)
    at = of_stream(streams, _FIELDS, row, num_rows, there) + (number - first) * width
    at += tl.load(bits + segment, mask=there, other=0) - tl.load(bits + line, mask=there, other=0)
    is_inside = there & (at + width <= of_stream(streams, _STOP, row, num_rows, there))
    low = get(words, at, width, is_inside).to(tl.int64)
    step = (tl.where(is_bad, 0, quotient) << width) + low + 1
    tl.store(steps + number, tl.where(there, step, 0), mask=number < limit)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "limit"])
def rank_gaps(
    segment_row, ends, sizes, sums, ranks, errors, num_rows, num_segments, limit, TILE: tl.constexpr
):  # fmt: skip
    """The written ranks, int32. sums: int64, of all steps up to each."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.load(ends + 2 * num_segments + 1)
    segment, first, _, size, _ = _written_of(ends, sizes, number, num_segments, there)
    base = tl.load(sums + first - 1, mask=there & (first > 0), other=0)
    rank = tl.load(sums + number, mask=there, other=0) - base - 1
    is_bad = there & (rank >= size)
    row = tl.load(segment_row + segment, mask=there, other=0)
    tl.atomic_min(errors + row, tl.full(row.shape, _END, tl.int64), mask=is_bad, sem="relaxed")
    tl.store(ranks + number, tl.minimum(rank, size).to(tl.int32), mask=there)
