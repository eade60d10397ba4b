"""Kernels in Triton for the codec `class`: elements counted, ranked and found by their classes.

A *line* is elements that lie one after another, cut into *lanes*, these into *stretches* of 2^15
elements or a lane, and these into *blocks*. `lines` is int64[10, rows], a column of what the names
below say for each line. Counts of what lies before each block in its stretch, and before each
stretch in its lane, say where an element of a given rank is. Nothing has the size of a line but
those: two bytes for each class of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

ADDRESS, LENGTH, LANE_BITS, CLASSES, LANE, SEGMENT, STRETCH, BLOCK, CHANGE, COUNT = range(10)
"""Columns of `lines`: the address of the first element; how many there are; elements of a lane as a
power of two; how many classes; the first lane, segment (class of a lane), stretch and block's
counts of the line; its first change, and how many."""

STRETCH_BITS = 15
"""Elements of a stretch, as a power of two, if a lane has as many: 16 bits count them."""

WEIGHTS, MOVES = 256, 128
"""Elements of a block: of weights, few of which are looked for; of changes, all of which are."""

COMPARED = 8192
"""Elements of blocks that one program looks at to rank or find some."""

ORDERED = 128
"""Changes that one program puts in order at once."""

SEARCHED = 256
"""Numbers that one program looks up."""

_ADDRESS, _LENGTH, _LANE_BITS = tl.constexpr(ADDRESS), tl.constexpr(LENGTH), tl.constexpr(LANE_BITS)
_CLASSES, _LANE, _SEGMENT = tl.constexpr(CLASSES), tl.constexpr(LANE), tl.constexpr(SEGMENT)
_STRETCH, _BLOCK = tl.constexpr(STRETCH), tl.constexpr(BLOCK)
_CHANGE, _COUNT = tl.constexpr(CHANGE), tl.constexpr(COUNT)
_STRETCH_BITS = tl.constexpr(STRETCH_BITS)


@triton.jit
def of_line(lines, column: tl.constexpr, row, num_rows):
    """What a column says."""
    return tl.load(lines + column * num_rows + row)


@triton.jit
def key_of(bits, KEY_AT: tl.constexpr, KEYS: tl.constexpr):
    """int32: the keys of unsigned bits."""
    if bits.dtype.primitive_bitwidth < 64:
        bits = bits.to(tl.uint32)
    return ((bits >> KEY_AT) & (KEYS - 1)).to(tl.int32)


@triton.jit
def _class_of(bits, table, there, KEY_AT: tl.constexpr, KEYS: tl.constexpr):
    """int32: the classes of unsigned bits, by the uint8[KEYS] classes of keys."""
    return tl.load(table + key_of(bits, KEY_AT, KEYS), mask=there, other=0).to(tl.int32)


@triton.jit
def lower_bound(numbers, low, high, wanted):
    """Where in increasing numbers from `low` to `high` the first is that is not below `wanted`."""
    while tl.max(high - low) > 0:
        middle = (low + high) >> 1
        there = low < high
        is_below = there & (tl.load(numbers + middle, mask=there, other=0).to(tl.int64) < wanted)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(there & ~is_below, middle, high)
    return low


@triton.jit
def segment_of(ends, number, num_segments, there):
    """The segments that numbers lie in, by int64[segments + 1] of where each begins."""
    low = tl.zeros_like(number)
    return lower_bound(ends, low, tl.where(there, low + num_segments, low), number + 1) - 1


@triton.jit(do_not_specialize=["num_rows"])
def count_keys(
    pieces, piece_row, found, num_rows, KEY_AT: tl.constexpr, KEYS: tl.constexpr,
    BINS: tl.constexpr, TYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count the keys of a piece of each program: int32[rows, KEYS], which were 0.

    pieces: int64[4, rows], the address of a line, its elements, how far pieces are apart, the first
    piece.
    """
    piece = tl.program_id(0)
    row = tl.load(piece_row + piece)
    begin = (piece - tl.load(pieces + 3 * num_rows + row)) * tl.load(pieces + 2 * num_rows + row)
    at = begin + tl.arange(0, TILE)
    there = at < tl.load(pieces + num_rows + row)
    line = tl.load(pieces + row).to(tl.pointer_type(TYPE))
    key = key_of(tl.load(line + at, mask=there, other=0), KEY_AT, KEYS)
    counts = tl.histogram(key, BINS, mask=there)
    bins = tl.arange(0, BINS)
    tl.atomic_add(found + row * KEYS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def count_classes(
    lines, stretch_row, classes, before, totals, num_rows,
    KEY_AT: tl.constexpr, KEYS: tl.constexpr, BINS: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Count the elements of each class of a stretch: the one pass over all of them.

    before: int16, of each block what lies before it in its stretch, by class.
    totals: int32[stretches, BINS], of each stretch all.
    """
    stretch = tl.program_id(0)
    row = tl.load(stretch_row + stretch)
    bits = tl.minimum(of_line(lines, _LANE_BITS, row, num_rows), _STRETCH_BITS)
    begin = (stretch - of_line(lines, _STRETCH, row, num_rows)) << bits
    length = tl.minimum(of_line(lines, _LENGTH, row, num_rows) - begin, 1 << bits)
    num_classes = of_line(lines, _CLASSES, row, num_rows)
    line = of_line(lines, _ADDRESS, row, num_rows).to(tl.pointer_type(TYPE)) + begin
    if ALIGNED:
        line = tl.multiple_of(line, 16)
    counts = before + of_line(lines, _BLOCK, row, num_rows) + begin // BLOCK * num_classes
    bins = tl.arange(0, BINS)
    running = tl.zeros([BINS], tl.int32)
    first = tl.zeros_like(length)
    while first < length:
        lane = first + tl.arange(0, BLOCK)
        there = lane < length
        found = tl.load(line + lane, mask=there, other=0)
        tl.store(counts + bins, running.to(tl.int16), mask=bins < num_classes)
        kinds = _class_of(found, classes + row * KEYS, there, KEY_AT, KEYS)
        running += tl.histogram(kinds, BINS, mask=there)
        counts += num_classes
        first += BLOCK
    tl.store(totals + stretch * BINS + bins, running)


@triton.jit(do_not_specialize=["num_rows"])
def add_stretches(lines, lane_row, totals, sizes, num_rows, BINS: tl.constexpr):
    """Make `totals` those of what lies before each stretch in its lane.

    sizes: int64[segments], elements of each class of each lane.
    """
    lane = tl.program_id(0)
    row = tl.load(lane_row + lane)
    lane_bits = of_line(lines, _LANE_BITS, row, num_rows)
    bits = tl.minimum(lane_bits, _STRETCH_BITS)
    number = lane - of_line(lines, _LANE, row, num_rows)
    first = number << (lane_bits - bits)
    each = (of_line(lines, _LENGTH, row, num_rows) + (1 << bits) - 1) >> bits
    last = tl.minimum(each, first + (1 << (lane_bits - bits)))
    num_classes = of_line(lines, _CLASSES, row, num_rows)
    bins = tl.arange(0, BINS)
    here = totals + (of_line(lines, _STRETCH, row, num_rows) + first) * BINS + bins
    running = tl.zeros([BINS], tl.int32)
    while first < last:
        found = tl.load(here)
        tl.store(here, running)
        running += found
        here += BINS
        first += 1
    segment = of_line(lines, _SEGMENT, row, num_rows) + number * num_classes + bins
    tl.store(sizes + segment, running.to(tl.int64), mask=bins < num_classes)


@triton.jit(do_not_specialize=["num_rows"])
def rank_elements(
    lines, tile_row, tile_first, classes, before, totals, positions, ends, ranks, kinds, num_rows,
    KEY_AT: tl.constexpr, KEYS: tl.constexpr, BINS: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ranks, int32, of elements among those of their class in their lane; `kinds`: their classes.

    ALL: of all elements of lines that have one lane each: `ranks` are then places in the order of
    row, class and position; `ends` says where segments begin in it.
    positions: Otherwise: int32, of the changes.
    """
    tile = tl.program_id(0)
    row = tl.load(tile_row + tile)
    lane = (tile - tl.load(tile_first + row)) * TILE + tl.arange(0, TILE)
    there = lane < of_line(lines, _COUNT, row, num_rows)
    at = of_line(lines, _CHANGE, row, num_rows) + lane
    if ALL:
        position = tl.where(there, lane, 0)
    else:
        position = tl.load(positions + at, mask=there, other=0).to(tl.int64)
    bits = tl.minimum(of_line(lines, _LANE_BITS, row, num_rows), _STRETCH_BITS)
    line = of_line(lines, _ADDRESS, row, num_rows).to(tl.pointer_type(TYPE))
    table = classes + row * KEYS
    kind = _class_of(tl.load(line + position, mask=there, other=0), table, there, KEY_AT, KEYS)
    block, column = position // BLOCK, tl.arange(0, BLOCK)[None, :]
    elements = block[:, None] * BLOCK + column
    are_before = there[:, None] & (elements < position[:, None])
    others = tl.load(line + elements, mask=are_before, other=0)
    found = _class_of(others, table, are_before, KEY_AT, KEYS)
    rank = tl.sum((are_before & (found == kind[:, None])).to(tl.int32), axis=1)
    num_classes = of_line(lines, _CLASSES, row, num_rows)
    counts = before + of_line(lines, _BLOCK, row, num_rows)
    rank += tl.load(counts + block * num_classes + kind, mask=there, other=0).to(tl.int32)
    stretch = of_line(lines, _STRETCH, row, num_rows) + (position >> bits)
    rank += tl.load(totals + stretch * BINS + kind, mask=there, other=0)
    if ALL:
        segment = of_line(lines, _SEGMENT, row, num_rows) + kind
        rank += tl.load(ends + segment, mask=there, other=0).to(tl.int32)
    else:
        tl.store(kinds + at, kind.to(tl.uint8), mask=there)
    tl.store(ranks + at, rank, mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def order_changes(
    lines, lane_row, positions, kinds, ranks, chosen, ordered, num_rows,
    BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Put the ranks of a lane's changes in the order of class and position.

    chosen: int64[segments], how many changes each class of each lane has.
    """
    lane = tl.program_id(0)
    row = tl.load(lane_row + lane)
    number = lane - of_line(lines, _LANE, row, num_rows)
    begin = of_line(lines, _CHANGE, row, num_rows) + tl.zeros([2], tl.int64)
    wanted = (number + tl.arange(0, 2)) << of_line(lines, _LANE_BITS, row, num_rows)
    stop = begin + of_line(lines, _COUNT, row, num_rows)
    bounds = lower_bound(positions, begin, stop, wanted)
    low, high = tl.min(bounds), tl.max(bounds)
    bins = tl.arange(0, BINS)
    running = tl.zeros([BINS], tl.int32)
    first = low
    while first < high:
        at = first + tl.arange(0, TILE)
        there = at < high
        kind = tl.load(kinds + at, mask=there, other=0).to(tl.int32)
        running += tl.histogram(kind, BINS, mask=there)
        first += TILE
    num_classes = of_line(lines, _CLASSES, row, num_rows)
    segment = of_line(lines, _SEGMENT, row, num_rows) + number * num_classes + bins
    tl.store(chosen + segment, running.to(tl.int64), mask=bins < num_classes)
    places = tl.cumsum(running, axis=0) - running
    first = low
    while first < high:
        lanes = tl.arange(0, TILE)
        at = first + lanes
        there = at < high
        kind = tl.load(kinds + at, mask=there, other=0).to(tl.int32)
        rank = tl.load(ranks + at, mask=there, other=0)
        is_earlier = (kind[:, None] == kind[None, :]) & (lanes[None, :] < lanes[:, None])
        place = tl.sum(is_earlier.to(tl.int32), axis=1)
        place += tl.sum(tl.where(kind[:, None] == bins[None, :], places[None, :], 0), axis=1)
        tl.store(ordered + low + place, rank, mask=there)
        places += tl.histogram(kind, BINS, mask=there)
        first += TILE


@triton.jit
def rank_at(ranks, first, count, number, flipped, there):
    """The rank of an element by its number among those that are listed, or that are not (flipped).

    Of `count` listed ranks from `first` on, increasing, t are below the element with the number j
    among the others if t of them have r_i - i <= j: its rank is j + t.
    """
    low = tl.zeros_like(number)
    high = tl.where(there & flipped, count, low)
    while tl.max(high - low) > 0:
        middle = (low + high) >> 1
        open_ = low < high
        rank = tl.load(ranks + first + middle, mask=open_, other=0).to(tl.int64)
        is_below = open_ & (rank - middle <= number)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(open_ & ~is_below, middle, high)
    listed = tl.load(ranks + first + number, mask=there & ~flipped, other=0).to(tl.int64)
    return tl.where(flipped, number + low, listed)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "limit"])
def find_blocks(
    lines, segment_row, before, totals, sizes, ends, ranks, blocks, rests,
    num_rows, num_segments, limit, BINS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of each change in the order of lane, class and rank: where its block begins in the row.

    ends: int64[3, segments + 1]: where the chosen ones of each segment begin, and the written ones.
    ranks: int32, the written ones.
    rests: int32, the rank in the block, and below it 8 bits of the class.
    """
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.minimum(tl.load(ends + num_segments), limit)
    segment = segment_of(ends, number, num_segments, there)
    first = tl.load(ends + segment, mask=there, other=0)
    chosen = tl.load(ends + segment + 1, mask=there, other=0) - first
    written_ends = ends + num_segments + 1 + segment
    written = tl.load(written_ends, mask=there, other=0)
    count = tl.load(written_ends + 1, mask=there, other=0) - written
    rank = rank_at(ranks, written, count, number - first, chosen > count, there)
    rank = tl.minimum(rank, tl.load(sizes + segment, mask=there, other=1) - 1)
    row = tl.load(segment_row + segment, mask=there, other=0)
    num_classes = of_line(lines, _CLASSES, row, num_rows)
    inside = tl.maximum(segment - of_line(lines, _SEGMENT, row, num_rows), 0)
    lane, kind = inside // num_classes, inside % num_classes
    lane_bits = of_line(lines, _LANE_BITS, row, num_rows)
    bits = tl.minimum(lane_bits, _STRETCH_BITS)
    length = of_line(lines, _LENGTH, row, num_rows)
    low = lane << (lane_bits - bits)
    last = tl.minimum((length + (1 << bits) - 1) >> bits, low + (1 << (lane_bits - bits)))
    line_stretch = of_line(lines, _STRETCH, row, num_rows)
    stretch = _last_not_above(totals + line_stretch * BINS + kind, BINS, low, last, rank, there)
    entry = totals + (line_stretch + stretch) * BINS + kind
    rank -= tl.load(entry, mask=there, other=0).to(tl.int64)
    low = stretch << bits
    last = (tl.minimum(length, low + (1 << bits)) + BLOCK - 1) // BLOCK
    counts = before + of_line(lines, _BLOCK, row, num_rows) + kind
    block = _last_not_above(counts, num_classes, low // BLOCK, last, rank, there)
    rank -= tl.load(counts + block * num_classes, mask=there, other=0).to(tl.int64)
    tl.store(blocks + number, (block * BLOCK).to(tl.int32), mask=there)
    tl.store(rests + number, (rank * 256 + kind).to(tl.int32), mask=there)


@triton.jit
def _last_not_above(counts, stride, low, high, rank, there):
    """Which is the last of `low` to `high` whose count, never falling, is at most `rank`."""
    first = low
    high = tl.where(there, high, low)
    while tl.max(high - low) > 0:
        middle = (low + high) >> 1
        open_ = low < high
        found = tl.load(counts + middle * stride, mask=open_, other=0).to(tl.int64)
        is_right = open_ & (found <= rank)
        low = tl.where(is_right, middle + 1, low)
        high = tl.where(open_ & ~is_right, middle, high)
    return tl.maximum(low - 1, first)


@triton.jit(do_not_specialize=["num_rows"])
def select_elements(
    lines, tile_row, tile_first, classes, blocks, rests, positions, num_rows,
    KEY_AT: tl.constexpr, KEYS: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Positions, int32, of changes of which `find_blocks` says the block and the rank in it."""
    tile = tl.program_id(0)
    row = tl.load(tile_row + tile)
    lane = (tile - tl.load(tile_first + row)) * TILE + tl.arange(0, TILE)
    there = lane < of_line(lines, _COUNT, row, num_rows)
    at = of_line(lines, _CHANGE, row, num_rows) + lane
    begin = tl.load(blocks + at, mask=there, other=0).to(tl.int64)
    rest = tl.load(rests + at, mask=there, other=0)
    line = of_line(lines, _ADDRESS, row, num_rows).to(tl.pointer_type(TYPE))
    column = tl.arange(0, BLOCK)[None, :]
    elements = begin[:, None] + column
    inside = there[:, None] & (elements < of_line(lines, _LENGTH, row, num_rows))
    found = tl.load(line + elements, mask=inside, other=0)
    kind = _class_of(found, classes + row * KEYS, inside, KEY_AT, KEYS)
    is_alike = (inside & (kind == (rest & 255)[:, None])).to(tl.int32)
    is_it = (is_alike > 0) & (tl.cumsum(is_alike, axis=1) == ((rest >> 8) + 1)[:, None])
    place = tl.sum(tl.where(is_it, column, 0), axis=1)
    tl.store(positions + at, (begin + place).to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "limit"])
def merge_classes(
    lines, segment_row, ends, positions, merged, num_rows, num_segments, limit, TILE: tl.constexpr
):  # fmt: skip
    """Put positions, which increase in each segment, in order over each lane."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = number < tl.minimum(tl.load(ends + num_segments), limit)
    segment = segment_of(ends, number, num_segments, there)
    row = tl.load(segment_row + segment, mask=there, other=0)
    num_classes = of_line(lines, _CLASSES, row, num_rows)
    line = of_line(lines, _SEGMENT, row, num_rows)
    first = line + tl.maximum(segment - line, 0) // num_classes * num_classes
    position = tl.load(positions + number, mask=there, other=0)
    place = tl.load(ends + first, mask=there, other=0)
    most = tl.max(num_classes)
    kind = tl.zeros_like(most)
    while kind < most:
        is_class = there & (kind < num_classes)
        low = tl.load(ends + first + kind, mask=is_class, other=0)
        high = tl.load(ends + first + kind + 1, mask=is_class, other=0)
        place += lower_bound(positions, low, high, position.to(tl.int64)) - low
        kind += 1
    tl.store(merged + place, position, mask=there)
