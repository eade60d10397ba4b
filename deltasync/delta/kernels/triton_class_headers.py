"""Kernels in Triton for the numbers that blocks of `class` begin with: a program for each row.

`heads` is int64[7, rows], a column of what the names below say, in bytes from the begin of all
data. What rows say of each class is int64[rows, 64]. An error is one of `triton_class_streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.codecs.bitstream import MAX_WIDTH
from deltasync.delta.codecs.class_frequent import MOST
from deltasync.delta.codecs.class_keys import MAX_CLASSES
from deltasync.delta.kernels.triton_class_streams import MANY, SHORT, SOUND, STREAM, WRONG, get, put
from deltasync.delta.kernels.triton_classes import CLASSES as _CLASSES_OF
from deltasync.delta.kernels.triton_classes import LANE_BITS as _LANE_BITS_OF
from deltasync.delta.kernels.triton_classes import LENGTH as _LENGTH_OF
from deltasync.delta.kernels.triton_classes import SEGMENT as _SEGMENT_OF
from deltasync.delta.kernels.triton_classes import of_line

SIZE, CLASSES, COUNTS, UNARY, UNARY_BYTES, FIELDS, FIELD_BYTES = range(7)
"""Columns of `heads`: elements of a lane as a power of two, or how many steps are listed; how many
classes; where counts or directions begin; the unary stream, and its bytes; fields, and theirs."""

_LANE_BITS, _CLASSES = tl.constexpr(_LANE_BITS_OF), tl.constexpr(_CLASSES_OF)
_LENGTH, _SEGMENT = tl.constexpr(_LENGTH_OF), tl.constexpr(_SEGMENT_OF)
_MAX, _MOST = tl.constexpr(MAX_CLASSES), tl.constexpr(MOST)
_WIDEST = tl.constexpr(MAX_WIDTH)
_SHORT, _SOUND, _WRONG = tl.constexpr(SHORT), tl.constexpr(SOUND), tl.constexpr(WRONG)
_STREAM, _MANY = tl.constexpr(STREAM), tl.constexpr(MANY)


@triton.jit
def _read(data, at, stop, error, SHORT_IS: tl.constexpr):
    """A varint, where the next number begins, and the error so far."""
    place = tl.arange(0, 8)
    there = (place < 5) & (at + place < stop) & (error == _SOUND)
    byte = tl.load(data + at + place, mask=there, other=0x80).to(tl.int64)
    last = tl.min(tl.where(byte < 0x80, place, 8))
    number = tl.sum(tl.where(place <= last, (byte & 0x7F) << (7 * place), 0))
    is_short = (error == _SOUND) & (last == 8)
    error = tl.where(is_short, SHORT_IS, error)
    is_good = error == _SOUND
    return tl.where(is_good, number, 0), tl.where(is_good, at + last + 1, at), error


@triton.jit
def _wrong(error, is_wrong):
    return tl.where((error == _SOUND) & is_wrong, _WRONG, error)


@triton.jit
def _take(at, size, stop, error, SHORT_IS: tl.constexpr):
    """Where the bytes after so many begin, and the error so far."""
    is_short = (error == _SOUND) & (size > stop - at)
    error = tl.where(is_short, SHORT_IS, error)
    return tl.where(error == _SOUND, at + size, at), error


@triton.jit
def _read_classes(data, at, stop, error, classes, row, KEYS: tl.constexpr):
    """How many classes, of which `classes`, uint8[rows, KEYS], gets those of the keys."""
    count, at, error = _read(data, at, stop, error, _SHORT)
    error = _wrong(error, (count < 1) | (count > _MAX))
    key = tl.arange(0, KEYS)
    kinds = tl.zeros([KEYS], tl.int32)
    first = tl.zeros_like(count)
    has_none = first > 0
    kind = tl.zeros_like(count) + 1
    while (kind < count) & (error == _SOUND):
        size, at, error = _read(data, at, stop, error, _SHORT)
        first += size
        has_none = has_none | (size == 0)
        kinds += (key >= first).to(tl.int32)
        kind += 1
    error = _wrong(error, has_none | (first >= KEYS))
    tl.store(classes + row * KEYS + key, kinds.to(tl.uint8))
    return tl.where(error == _SOUND, count, 1), at, error


@triton.jit
def _read_pairs(data, at, stop, error, count, firsts, seconds):
    """Two numbers of each class, and the greatest of both."""
    kind = tl.zeros_like(count)
    most, widest = kind, kind
    while (kind < count) & (error == _SOUND):
        one, at, error = _read(data, at, stop, error, _SHORT)
        other, at, error = _read(data, at, stop, error, _SHORT)
        tl.store(firsts + kind, one)
        tl.store(seconds + kind, other)
        most, widest = tl.maximum(most, one), tl.maximum(widest, other)
        kind += 1
    return most, widest, at, error


@triton.jit(do_not_specialize=["num_rows"])
def read_index(
    data, blocks, lengths, heads, classes, least, widths, errors, num_rows, KEYS: tl.constexpr
):  # fmt: skip
    """Read the header of an index block.

    blocks: int64[2, rows], where each row's block begins and ends. lengths: int64[rows], elements.
    """
    row = tl.program_id(0)
    at, stop = tl.load(blocks + row), tl.load(blocks + num_rows + row)
    error = tl.zeros_like(at) + _SOUND
    bits, at, error = _read(data, at, stop, error, _SHORT)
    error = _wrong(error, (bits < 10) | (bits > 20))
    bits = tl.where(error == _SOUND, bits, 20)
    count, at, error = _read_classes(data, at, stop, error, classes, row, KEYS)
    here = row * _MAX
    most, widest, at, error = _read_pairs(data, at, stop, error, count, least + here, widths + here)
    error = _wrong(error, (most > (1 << bits)) | (widest > bits + 1))
    kind = tl.arange(0, _MAX)
    is_used = (kind < count) & (error == _SOUND)
    tl.debug_barrier()
    each = tl.sum(tl.load(widths + here + kind, mask=is_used, other=0))
    lanes = (tl.load(lengths + row) + (1 << bits) - 1) >> bits
    counts = at
    at, error = _take(at, (each * lanes + 7) // 8, stop, error, _SHORT)
    size, at, error = _read(data, at, stop, error, _STREAM)
    unary = at
    at, error = _take(at, size, stop, error, _STREAM)
    is_good = error == _SOUND
    tl.store(errors + row, error)
    tl.store(heads + row, bits)
    tl.store(heads + num_rows + row, count)
    tl.store(heads + 2 * num_rows + row, counts)
    tl.store(heads + 3 * num_rows + row, unary)
    tl.store(heads + 4 * num_rows + row, tl.where(is_good, size, 0))
    tl.store(heads + 5 * num_rows + row, at)
    tl.store(heads + 6 * num_rows + row, tl.where(is_good, stop - at, 0))


@triton.jit(do_not_specialize=["num_rows"])
def read_value(
    data, blocks, counts, heads, classes, listed, chosen, parameters, errors, num_rows,
    KEYS: tl.constexpr, ITEM: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Read the header of a value block.

    counts: int64[rows], changes. listed: int64[rows, 64], the frequent steps; LISTED, the most that
    there can be. chosen, parameters: int64[rows, 64].
    """
    row = tl.program_id(0)
    at, stop = tl.load(blocks + row), tl.load(blocks + num_rows + row)
    error = tl.zeros_like(at) + _SOUND
    count, at, error = _read_classes(data, at, stop, error, classes, row, KEYS)
    number, at, error = _read(data, at, stop, error, _SHORT)
    error = _wrong(error, number > LISTED)
    begin = at
    at, error = _take(at, number * ITEM, stop, error, _SHORT)
    number = tl.where(error == _SOUND, number, 0)
    place = tl.arange(0, _MOST)
    step = tl.zeros([_MOST], tl.int64)
    for n in tl.static_range(ITEM):
        address = data + begin + place * ITEM + n
        step |= tl.load(address, mask=place < number, other=0).to(tl.int64) << (8 * n)
    tl.store(listed + row * _MOST + place, step)
    here = row * _MAX
    _, widest, at, error = _read_pairs(
        data, at, stop, error, count, chosen + here, parameters + here
    )
    error = _wrong(error, widest > _WIDEST)
    unary_bytes, at, error = _read(data, at, stop, error, _SHORT)
    field_bytes, at, error = _read(data, at, stop, error, _SHORT)
    directions = at
    at, error = _take(at, (tl.load(counts + row) + 7) // 8, stop, error, _SHORT)
    unary = at
    at, error = _take(at, unary_bytes, stop, error, _SHORT)
    fields = at
    at, error = _take(at, field_bytes, stop, error, _SHORT)
    is_good = error == _SOUND
    tl.store(errors + row, error)
    tl.store(heads + row, number)
    tl.store(heads + num_rows + row, count)
    tl.store(heads + 2 * num_rows + row, directions)
    tl.store(heads + 3 * num_rows + row, unary)
    tl.store(heads + 4 * num_rows + row, tl.where(is_good, unary_bytes, 0))
    tl.store(heads + 5 * num_rows + row, fields)
    tl.store(heads + 6 * num_rows + row, tl.where(is_good, field_bytes, 0))


@triton.jit
def _write(data, at, number, WRITE: tl.constexpr):
    """Where the next number begins."""
    length = tl.zeros_like(number) + 1
    for place in tl.static_range(1, 5):
        length += (number >= (1 << (7 * place))).to(tl.int64)
    if WRITE:
        place = tl.arange(0, 8)
        more = tl.where(place < length - 1, 0x80, 0)
        byte = ((number >> (7 * place)) & 0x7F) | more
        tl.store(data + at + place, byte.to(tl.uint8), mask=place < length)
    return at + length


@triton.jit
def _write_classes(data, at, count, classes, row, KEYS: tl.constexpr, WRITE: tl.constexpr):
    at = _write(data, at, count, WRITE)
    kinds = tl.load(classes + row * KEYS + tl.arange(0, KEYS)).to(tl.int64)
    kind = tl.zeros_like(count)
    while kind < count - 1:
        at = _write(data, at, tl.sum((kinds == kind).to(tl.int64)), WRITE)
        kind += 1
    return at


@triton.jit
def _write_pairs(data, at, count, firsts, seconds, WRITE: tl.constexpr):
    kind = tl.zeros_like(count)
    while kind < count:
        at = _write(data, at, tl.load(firsts + kind), WRITE)
        at = _write(data, at, tl.load(seconds + kind), WRITE)
        kind += 1
    return at


@triton.jit(do_not_specialize=["num_rows"])
def write_index(
    data, lines, begins, classes, least, widths, unary_bits, heads, num_rows,
    KEYS: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Write the header of an index block, or only say in `heads` how long it gets.

    begins: int64[rows], where each row's block begins.
    """
    row = tl.program_id(0)
    at = tl.load(begins + row)
    bits = of_line(lines, _LANE_BITS, row, num_rows)
    count = of_line(lines, _CLASSES, row, num_rows)
    at = _write(data, at, bits, WRITE)
    at = _write_classes(data, at, count, classes, row, KEYS, WRITE)
    at = _write_pairs(data, at, count, least + row * _MAX, widths + row * _MAX, WRITE)
    tl.store(heads + 2 * num_rows + row, at)
    kind = tl.arange(0, _MAX)
    each = tl.sum(tl.load(widths + row * _MAX + kind, mask=kind < count, other=0))
    lanes = (of_line(lines, _LENGTH, row, num_rows) + (1 << bits) - 1) >> bits
    at += (each * lanes + 7) // 8
    size = (tl.load(unary_bits + row) + 7) // 8
    at = _write(data, at, size, WRITE)
    tl.store(heads + 3 * num_rows + row, at)
    tl.store(heads + 5 * num_rows + row, at + size)


@triton.jit(do_not_specialize=["num_rows"])
def write_value(
    data, counts, begins, num_classes, classes, num_listed, listed, chosen, parameters, unary_bits,
    field_bits, heads, num_rows, KEYS: tl.constexpr, ITEM: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Write the header of a value block, or only say in `heads` how long it gets.

    counts, begins, num_classes, num_listed: int64[rows]; chosen, parameters: int64[rows, 64].
    """
    row = tl.program_id(0)
    at = tl.load(begins + row)
    count = tl.load(num_classes + row)
    at = _write_classes(data, at, count, classes, row, KEYS, WRITE)
    number = tl.load(num_listed + row)
    at = _write(data, at, number, WRITE)
    if WRITE:
        place = tl.arange(0, _MOST)
        step = tl.load(listed + row * _MOST + place, mask=place < number, other=0)
        for n in tl.static_range(ITEM):
            byte = ((step >> (8 * n)) & 0xFF).to(tl.uint8)
            tl.store(data + at + place * ITEM + n, byte, mask=place < number)
    at += number * ITEM
    at = _write_pairs(data, at, count, chosen + row * _MAX, parameters + row * _MAX, WRITE)
    unary = (tl.load(unary_bits + row) + 7) // 8
    fields = (tl.load(field_bits + row) + 7) // 8
    at = _write(data, at, unary, WRITE)
    at = _write(data, at, fields, WRITE)
    tl.store(heads + 2 * num_rows + row, at)
    at += (tl.load(counts + row) + 7) // 8
    tl.store(heads + 3 * num_rows + row, at)
    tl.store(heads + 5 * num_rows + row, at + unary)
    tl.store(heads + 6 * num_rows + row, at + unary + fields)


@triton.jit(do_not_specialize=["num_rows"])
def measure_counts(lines, chosen, least, widths, num_rows, TILE: tl.constexpr):
    """Of each class of a row the least number of changes in a lane, and the bits of the rest."""
    row = tl.program_id(0)
    bits = of_line(lines, _LANE_BITS, row, num_rows)
    count = of_line(lines, _CLASSES, row, num_rows)
    lanes = (of_line(lines, _LENGTH, row, num_rows) + (1 << bits) - 1) >> bits
    kind = tl.arange(0, _MAX)[None, :]
    here = chosen + of_line(lines, _SEGMENT, row, num_rows)
    low = tl.full([_MAX], 1 << 40, tl.int64)
    high = tl.zeros([_MAX], tl.int64)
    first = tl.zeros_like(lanes)
    while first < lanes:
        lane = first + tl.arange(0, TILE)[:, None]
        there = (lane < lanes) & (kind < count)
        found = tl.load(here + lane * count + kind, mask=there, other=0)
        low = tl.minimum(low, tl.min(tl.where(there, found, 1 << 40), axis=0))
        high = tl.maximum(high, tl.max(found, axis=0))
        first += TILE
    rest = tl.maximum(high - low, 0)
    width = tl.zeros([_MAX], tl.int64)
    for n in tl.static_range(21):
        width += ((rest >> n) > 0).to(tl.int64)
    kind = tl.arange(0, _MAX)
    tl.store(least + row * _MAX + kind, low, mask=kind < count)
    tl.store(widths + row * _MAX + kind, width, mask=kind < count)


@triton.jit
def _count_field(lines, segment_row, widths, heads, segment, there, num_rows):
    """Of segments: row, class, and the place and width of the field of its number of changes."""
    row = tl.load(segment_row + segment, mask=there, other=0)
    count = of_line(lines, _CLASSES, row, num_rows)
    bits = of_line(lines, _LANE_BITS, row, num_rows)
    lanes = (of_line(lines, _LENGTH, row, num_rows) + (1 << bits) - 1) >> bits
    inside = tl.maximum(segment - of_line(lines, _SEGMENT, row, num_rows), 0)
    lane, kind = inside // count, inside % count
    most, before = tl.max(kind), tl.zeros_like(kind)
    one = tl.zeros_like(most)
    while one < most:
        before += tl.load(widths + row * _MAX + one, mask=there & (one < kind), other=0)
        one += 1
    width = tl.load(widths + row * _MAX + kind, mask=there, other=0)
    at = 8 * tl.load(heads + 2 * num_rows + row) + before * lanes + lane * width
    return row, kind, at, width


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def write_counts(
    lines, segment_row, chosen, least, widths, heads, words, num_rows, num_segments,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write how many changes each segment has."""
    segment = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = segment < num_segments
    row, kind, at, _ = _count_field(lines, segment_row, widths, heads, segment, there, num_rows)
    count = tl.load(chosen + segment, mask=there, other=0)
    count -= tl.load(least + row * _MAX + kind, mask=there, other=0)
    put(words, at, count.to(tl.uint64), there & (count > 0))


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def read_counts(
    lines, segment_row, sizes, least, widths, heads, words, chosen, errors, num_rows, num_segments,
    TILE: tl.constexpr,
):  # fmt: skip
    """How many changes each segment has, int64: what `write_counts` wrote."""
    segment = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = segment < num_segments
    row, kind, at, width = _count_field(lines, segment_row, widths, heads, segment, there, num_rows)
    there = there & (tl.load(errors + row) > _WRONG)
    count = get(words, at, width, there).to(tl.int64)
    count += tl.load(least + row * _MAX + kind, mask=there, other=0)
    is_many = there & (count > tl.load(sizes + segment, mask=there, other=0))
    tl.atomic_min(errors + row, tl.full(row.shape, _MANY, tl.int64), mask=is_many, sem="relaxed")
    tl.store(chosen + segment, count, mask=segment < num_segments)
