"""Kernels over live weights: digests, the check of what a bucket would write, and its writing.

Weights that lie in one run are found by their address alone. Others are found through *boxes*:
int64[2 + 3 * DIMS + 16, num_boxes], the address of a box's first element, its flat position in the
parameter, and of each dimension size, distance of positions and distance in memory, in elements.
What holds for chunks and addresses in `triton` holds here.

With CODES, an element is so many codes of 4 bits, each at a place of its own: see `Spread`. Then
the address is that of the storage, and distances in memory are in codes. The last numbers of a box
say how much farther each code of an element is. A write adds, to the word that has a code, how much
the code changes. So programs that write other codes of the same word do not disturb each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels.triton_base import (
    GOLDEN,
    add_by_chunk,
    add_up,
    aligned,
    left_out,
    length_of,
    mix,
    seed_of,
)

PART = 256
"""Indices of a segment that one program writes to and reads back: one a thread."""

CLEAR = (1 << 31) - 1
"""What the flag of `check` holds while no row is bad."""

ACCUMULATORS = 64
"""Over how many places sums of all programs are spread, to keep atomics apart."""

_ACCUMULATORS = tl.constexpr(ACCUMULATORS)
_CLEAR = tl.constexpr(CLEAR)


@triton.jit
def _find(box, num_boxes, position, end, DIMS: tl.constexpr):
    """(where, inside): elements from a box's first one to flat positions, if they lie in it.

    Positions are less than `end`.
    """
    rest = position - tl.load(box + num_boxes)
    inside = rest >= 0
    where = tl.zeros_like(rest)
    for dim in tl.static_range(DIMS):
        column = box + (2 + 3 * dim) * num_boxes
        size, stride = tl.load(column), tl.load(column + num_boxes)
        index = rest
        if size == 1:
            index = (rest >= stride).to(tl.int64)
        elif stride > 1:
            if end < 0x80000000:  # of 64 bits a division takes several times as long
                few = tl.minimum(stride, 0x7FFFFFFF).to(tl.uint32)  # beyond it: index 0
                index = (rest.to(tl.uint32) // few).to(tl.int64)
            else:
                index = rest // stride
        inside &= index < size
        rest -= index * stride
        where += index * tl.load(column + 2 * num_boxes)
    return where, inside & (rest == 0)


@triton.jit
def _box(boxes, row, num_rows, DIMS: tl.constexpr):
    """The box of a row."""
    return boxes + tl.load(row + 10 * num_rows) if DIMS else boxes


@triton.jit
def _held(row, boxes, num_boxes, num_rows, position, there, DIMS: tl.constexpr):
    """(where, there, any): elements from a row's address on to flat positions; with DIMS those in
    its box.
    """
    if DIMS:
        end = tl.load(row + 3 * num_rows) + tl.load(row + 4 * num_rows)
        box = _box(boxes, row, num_rows, DIMS)
        where, inside = _find(box, num_boxes, position, end, DIMS)
        there &= inside
        return where, there, tl.max(there.to(tl.int32)) > 0
    else:
        return position, there, True


@triton.jit
def _at(address, where, TYPE: tl.constexpr, CODES: tl.constexpr):
    """Elements so far from an address, as `_get` takes them."""
    if CODES:
        return where
    else:
        return address.to(tl.pointer_type(TYPE)) + where


@triton.jit
def _get(
    weights, there, address, box, num_boxes, TYPE: tl.constexpr, DIMS: tl.constexpr,
    CODES: tl.constexpr, VOLATILE: tl.constexpr,
):  # fmt: skip
    """Bits of elements: at pointers, or with CODES of a box, at places from an address on."""
    if CODES:
        words = address.to(tl.pointer_type(tl.uint32))
        bits = tl.zeros_like(weights).to(TYPE)
        for code in tl.static_range(CODES):
            place = weights + tl.load(box + (2 + 3 * DIMS + code) * num_boxes)
            word = tl.load(words + (place >> 3), mask=there, other=0, volatile=VOLATILE)
            own = (word >> ((place & 7) * 4).to(tl.uint32)) & 15
            bits |= own.to(TYPE) << (4 * code)
    else:
        bits = tl.load(weights, mask=there, other=0, volatile=VOLATILE)
    return bits


@triton.jit
def _put(
    weights, there, address, box, num_boxes, old, new, DIMS: tl.constexpr, CODES: tl.constexpr
):
    """Overwrite elements, as `_get` takes them. With CODES, `old` is what is there."""
    if CODES:
        words = address.to(tl.pointer_type(tl.int32))
        for code in tl.static_range(CODES):
            place = weights + tl.load(box + (2 + 3 * DIMS + code) * num_boxes)
            change = ((new >> (4 * code)) & 15).to(tl.int32) - ((old >> (4 * code)) & 15).to(
                tl.int32
            )
            change = change << ((place & 7) * 4).to(tl.int32)
            tl.atomic_add(words + (place >> 3), change, mask=there & (change != 0), sem="relaxed")
        tl.debug_barrier()  # before they are read back
    else:
        tl.store(weights, new, mask=there)


@triton.jit(do_not_specialize=["num_boxes", "blocks_each"])
def digest(
    addresses, starts, numels, keys, cols, gaps, chunks, box_of, boxes, num_boxes, digests,
    blocks_each,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, GAPS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Digests of chunks, with DIMS of what of each lies in a box. Others are as in `pack_dense`."""
    item, block = tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    chunk = tl.load(chunks + item)
    numel = length_of(numels + chunk, ALIGNED)
    if block * BLOCK < numel:
        lane = tl.arange(0, BLOCK)
        offset = block * BLOCK + lane
        there = offset < numel
        start, box = tl.load(starts + chunk), boxes
        address = tl.load(addresses + chunk)
        if DIMS:
            box += tl.load(box_of + item)
            address = tl.load(box)
            where, inside = _find(box, num_boxes, start + offset, start + numel, DIMS)
            there &= inside
            weights = _at(address, where, TYPE, CODES)
        else:
            weights = aligned(address, TYPE, ALIGNED) + offset
        bits = _get(weights, there, address, box, num_boxes, TYPE, DIMS, CODES, False)
        key = tl.load(keys + chunk).to(tl.uint64, bitcast=True)
        seed = seed_of(key, start + block * BLOCK) + lane.to(tl.uint64) * GOLDEN
        if GAPS:
            seed = seed_of(seed, left_out(start + offset, cols + chunk, gaps + chunk))
        add_up(digests, item, tl.where(there, mix(seed, bits), 0))


@triton.jit(do_not_specialize=["num_boxes", "num_rows"])
def check(
    rows, segment_row, boxes, num_boxes, payload, flag, digests, sums, num_rows,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """Raise `flag` for rows with bad indices, and tell by how much good ones change the digests.

    rows: int64[11, num_rows]: where indices begin in the payload, in int32 units; where values
        begin, in elements; their number; span; flat position that indices count from; address
        of the parameter, 0 if it is not held; digest key; its first digest; its number; its first
        segment; with DIMS a box of it, in which alone the row is looked for.
    segment_row: int64[segments]: of a row each, SEGMENT elements or what is left of it.
    """
    segment = tl.program_id(0)
    row = rows + tl.load(segment_row + segment)
    lane = (segment - tl.load(row + 9 * num_rows)) * SEGMENT + tl.arange(0, SEGMENT)
    there = lane < tl.load(row + 2 * num_rows)
    indices = payload.to(tl.pointer_type(tl.int32)) + tl.load(row)
    index = tl.load(indices + lane, mask=there, other=0).to(tl.int64)
    before = tl.load(indices + lane - 1, mask=there & (lane > 0), other=-1).to(tl.int64)
    good = there & (index >= 0) & (index > before) & (index < tl.load(row + 3 * num_rows))
    if tl.max((there & ~good).to(tl.int32)) > 0:
        tl.atomic_min(flag, tl.load(row + 8 * num_rows).to(tl.int32), sem="relaxed")
    address = tl.load(row + 5 * num_rows)
    if address != 0:  # held here
        values = payload.to(tl.pointer_type(TYPE)) + tl.load(row + num_rows)
        position = tl.load(row + 4 * num_rows) + index
        where, good, is_any = _held(row, boxes, num_boxes, num_rows, position, good, DIMS)
        if is_any:
            new = tl.load(values + lane, mask=good, other=0)
            box = _box(boxes, row, num_rows, DIMS)
            weights = _at(address, where, TYPE, CODES)
            old = _get(weights, good, address, box, num_boxes, TYPE, DIMS, CODES, False)
            key = tl.load(row + 6 * num_rows).to(tl.uint64, bitcast=True)
            seed = seed_of(key, position)
            gained = tl.where(good, mix(seed, new), 0)
            change = gained - tl.where(good, mix(seed, old), 0)
            add_up(sums, segment % _ACCUMULATORS, gained)
            add_by_chunk(digests + tl.load(row + 7 * num_rows), position, good, change, CHUNK)


@triton.jit(do_not_specialize=["num_boxes", "num_rows", "num_places"])
def read_old(
    rows, segment_row, boxes, num_boxes, found, num_rows, num_places,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, GAPS: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """Copy the bits that rows change, add up their digests, and find bad indices.

    rows: int64[12, num_rows]: the address of indices; the address where old bits go; their number;
        span; flat position that indices count from; address of the parameter, 0 to check indices
        alone; digest key; its place in `found`; with GAPS the cols of the parameter's region; its
        first segment; with DIMS a box, as in `check`; with GAPS the gap.
    found: int64[2, num_places], added up: digests of the old bits that are held; segments with an
        index that is out of range, unsorted or repeated. Nothing is read by such an index.
    """
    segment = tl.program_id(0)
    row = rows + tl.load(segment_row + segment)
    lane = (segment - tl.load(row + 9 * num_rows)) * SEGMENT + tl.arange(0, SEGMENT)
    there = lane < tl.load(row + 2 * num_rows)
    indices = tl.load(row).to(tl.pointer_type(tl.int32))
    index = tl.load(indices + lane, mask=there, other=0).to(tl.int64)
    before = tl.load(indices + lane - 1, mask=there & (lane > 0), other=-1).to(tl.int64)
    good = there & (index >= 0) & (index > before) & (index < tl.load(row + 3 * num_rows))
    place = found + tl.load(row + 7 * num_rows)
    if tl.max((there & ~good).to(tl.int32)) > 0:
        tl.atomic_add(place + num_places, 1, sem="relaxed")
    address = tl.load(row + 5 * num_rows)
    if address != 0:
        position = tl.load(row + 4 * num_rows) + index
        where, good, is_any = _held(row, boxes, num_boxes, num_rows, position, good, DIMS)
        if GAPS:
            gap = tl.load(row + 11 * num_rows)
            if gap != 0:
                where -= position // (tl.load(row + 8 * num_rows) + gap) * gap
        if is_any:
            box = _box(boxes, row, num_rows, DIMS)
            weights = _at(address, where, TYPE, CODES)
            bits = _get(weights, good, address, box, num_boxes, TYPE, DIMS, CODES, False)
            target = tl.load(row + num_rows).to(tl.pointer_type(TYPE))
            tl.store(target + lane, bits, mask=good)
            seed = seed_of(tl.load(row + 6 * num_rows).to(tl.uint64, bitcast=True), position)
            add_up(place, 0, tl.where(good, mix(seed, bits), 0))


@triton.jit(do_not_specialize=["num_boxes", "num_rows"])
def write(
    rows, segment_row, boxes, num_boxes, payload, flag, sums, num_rows,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, KEEP: tl.constexpr,
    SEGMENT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write rows, as `check` takes them, unless `flag` is raised, and read them back.

    KEEP: What they replace takes their place in the payload.
    """
    segment, nth = tl.program_id(0) // (SEGMENT // PART), tl.program_id(0) % (SEGMENT // PART)
    row = rows + tl.load(segment_row + segment)
    first = (segment - tl.load(row + 9 * num_rows)) * SEGMENT + nth * PART
    count = tl.load(row + 2 * num_rows)
    address = tl.load(row + 5 * num_rows)
    if (address != 0) & (first < count) & (tl.load(flag) == _CLEAR):
        lane = first + tl.arange(0, PART)  # a thread with several would wait for each in turn
        there = lane < count
        indices = payload.to(tl.pointer_type(tl.int32)) + tl.load(row)
        position = tl.load(row + 4 * num_rows) + tl.load(indices + lane, mask=there, other=0)
        where, there, is_any = _held(row, boxes, num_boxes, num_rows, position, there, DIMS)
        if is_any:
            box = _box(boxes, row, num_rows, DIMS)
            weights = _at(address, where, TYPE, CODES)
            values = payload.to(tl.pointer_type(TYPE)) + tl.load(row + num_rows) + lane
            key = tl.load(row + 6 * num_rows).to(tl.uint64, bitcast=True)
            seed = seed_of(key, position)
            new = tl.load(values, mask=there, other=0)
            old = new
            if KEEP or CODES:
                old = _get(weights, there, address, box, num_boxes, TYPE, DIMS, CODES, False)
            if KEEP:
                tl.store(values, old, mask=there)
            _put(weights, there, address, box, num_boxes, old, new, DIMS, CODES)
            read = _get(weights, there, address, box, num_boxes, TYPE, DIMS, CODES, True)
            add_up(sums, tl.program_id(0) % _ACCUMULATORS, tl.where(there, mix(seed, read), 0))


@triton.jit
def _piece(
    pieces, boxes, num_boxes, payload, num_pieces, blocks_each, TYPE, DIMS: tl.constexpr,
    CODES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK,
):  # fmt: skip
    """(values, weights, seeds, mask, address, box) of the elements of a piece that this program
    looks at.
    """
    column, block = pieces + tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    lane = tl.arange(0, BLOCK)
    offset = block * BLOCK + lane
    start = tl.load(column + 2 * num_pieces)
    there = offset < length_of(column + num_pieces, ALIGNED)
    values = payload.to(tl.pointer_type(TYPE)) + tl.load(column)
    address, box = tl.load(column + 3 * num_pieces), boxes
    if DIMS:
        box += tl.load(column + 7 * num_pieces)
        end = start + tl.load(column + num_pieces)
        where, inside = _find(box, num_boxes, start + offset, end, DIMS)
        there &= inside
        weights = _at(address, where, TYPE, CODES)
    else:
        weights = address.to(tl.pointer_type(TYPE)) + start
        if ALIGNED:
            values, weights = tl.multiple_of(values, 16), tl.multiple_of(weights, 16)
        weights += offset
    key = tl.load(column + 4 * num_pieces).to(tl.uint64, bitcast=True)
    seed = seed_of(key, start + block * BLOCK)
    return values + offset, weights, seed + lane.to(tl.uint64) * GOLDEN, there, address, box


@triton.jit(do_not_specialize=["num_boxes", "num_pieces", "blocks_each"])
def check_dense(
    pieces, boxes, num_boxes, payload, digests, sums, num_pieces, blocks_each,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """By how much dense pieces will change the digests.

    pieces: int64[8, num_pieces]: where values begin in the payload, in elements; their
        number; flat position of the first; address of the parameter; digest key; which digest
        it belongs to; whether it makes up all of that; with DIMS a box of the parameter, in which
        alone the piece is looked for.
    ALIGNED: Each piece begins at multiples of 16 bytes, and has a multiple of 16 elements.
    """
    piece, block = tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    if block * BLOCK < tl.load(pieces + num_pieces + piece):
        values, weights, seed, there, address, box = _piece(
            pieces, boxes, num_boxes, payload, num_pieces, blocks_each, TYPE, DIMS, CODES, ALIGNED,
            BLOCK,
        )  # fmt: skip
        gained = tl.where(there, mix(seed, tl.load(values, mask=there, other=0)), 0)
        add_up(sums, tl.program_id(0) % _ACCUMULATORS, gained)
        if tl.load(pieces + 6 * num_pieces + piece) == 0:
            old = _get(weights, there, address, box, num_boxes, TYPE, DIMS, CODES, False)
            gained -= tl.where(there, mix(seed, old), 0)
        add_up(digests, tl.load(pieces + 5 * num_pieces + piece), gained)


@triton.jit(do_not_specialize=["num_boxes", "num_pieces", "blocks_each"])
def write_dense(
    pieces, boxes, num_boxes, payload, flag, digests, sums, num_pieces, blocks_each,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, IN_PLACE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dense pieces, unless `flag` is raised, and read them back.

    IN_PLACE: Account for them in `digests`, which `check_dense` has not done. Otherwise what they
        replace takes their place in the payload; the second half of `sums` takes the digests of
        what only this kernel looks at: old bits of pieces that make up all of a digest.
    """
    piece, block = tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    nth = tl.program_id(0) % _ACCUMULATORS
    is_here = block * BLOCK < tl.load(pieces + num_pieces + piece)
    if is_here & (tl.load(flag) == _CLEAR):
        values, weights, seed, there, address, box = _piece(
            pieces, boxes, num_boxes, payload, num_pieces, blocks_each, TYPE, DIMS, CODES, ALIGNED,
            BLOCK,
        )  # fmt: skip
        new = tl.load(values, mask=there, other=0)
        old = new
        is_part = tl.load(pieces + 6 * num_pieces + piece) == 0
        lost = tl.zeros((BLOCK,), tl.uint64)
        if CODES or not IN_PLACE:
            old = _get(weights, there, address, box, num_boxes, TYPE, DIMS, CODES, False)
        if IN_PLACE:
            if is_part:
                if not CODES:
                    old = tl.load(weights, mask=there, other=0)
                lost = tl.where(there, mix(seed, old), 0)
        else:
            tl.store(values, old, mask=there)
            if not is_part:
                add_up(sums, _ACCUMULATORS + nth, tl.where(there, mix(seed, old), 0))
        _put(weights, there, address, box, num_boxes, old, new, DIMS, CODES)
        read = _get(weights, there, address, box, num_boxes, TYPE, DIMS, CODES, True)
        gained = tl.where(there, mix(seed, read), 0)
        if IN_PLACE:
            add_up(digests, tl.load(pieces + 5 * num_pieces + piece), gained - lost)
        else:
            add_up(sums, nth, gained)
