"""Kernels over tiles in memory: digests, what changes would do, and their writing.

What holds for kernels of `tiles` holds here. Weights that lie in one run are found by the address
in the table alone. Others are found through *boxes*: int64[2 + 3 * DIMS + 16, num_boxes], the
address of a box's first element, its flat position in the parameter, and of each dimension size,
distance of positions and distance in memory, in elements. The table has for each tile the flat
position of its first element, CODES if it lies in boxes, and which of `entries`, int32[n], are the
boxes that it meets: the first, and how many.

With CODES, which is 0 otherwise, an element is so many codes of 4 bits, each at a place of its own:
see `Spread`. Then the address is that of the storage, and distances in memory are in codes. The
last numbers of a box say how much farther each code of an element is. A write adds, to the word
that has a code, how much the code changes. So programs that write other codes of the same word do
not disturb each other.

Arguments that all have:
    table, boxes, entries, num_boxes: Where weights are.
    DIMS: Of boxes. 0 for those in one run: others are left out, as those in one run are otherwise.
    SMALL: No parameter has 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels.tiles import (
    CLEAR,
    PARAMETERS,
    add_by_chunk,
    far_from,
    lane_at,
    seeds_of,
    whole_at,
)
from deltasync.delta.kernels.triton_base import add_up, mix, seed_of

ACCUMULATORS = 64
"""Over how many places sums of all programs are spread, to keep atomics apart."""

MOST_CODES = 16
"""Of 4 bits, in an element of 8 bytes."""

PREDICT, WRITE, REPLACE, READ_BACK = range(4)
"""What `change` does: keep what changes replace, and tell by how much they change digests; write
them; both at once, keeping nothing; add up the digests of what is there.
"""

_ACCUMULATORS, _CLEAR = tl.constexpr(ACCUMULATORS), tl.constexpr(CLEAR)
_PARAMETERS = tl.constexpr(PARAMETERS)
_PREDICT, _WRITE = tl.constexpr(PREDICT), tl.constexpr(WRITE)
_READ_BACK = tl.constexpr(READ_BACK)


@triton.jit
def _inside(box, num_boxes, position, there, DIMS: tl.constexpr, SMALL: tl.constexpr):
    """(where, inside): elements from the first one of their boxes to flat positions, if they lie in
    these.
    """
    rest = position - tl.load(box + num_boxes, mask=there, other=0)
    inside = there & (rest >= 0)
    where = tl.zeros_like(rest)
    for dim in tl.static_range(DIMS):
        column = box + (2 + 3 * dim) * num_boxes
        size = tl.load(column, mask=there, other=1)
        stride = tl.load(column + num_boxes, mask=there, other=1)
        if SMALL:  # of 64 bits a division takes several times as long
            few = tl.minimum(stride, 0x7FFFFFFF).to(tl.uint32)  # beyond it: index 0
            index = (rest.to(tl.uint32) // few).to(tl.int64)
        else:
            index = rest // stride
        inside &= index < size
        rest -= index * stride
        where += index * tl.load(column + 2 * num_boxes, mask=there, other=0)
    return where, inside & (rest == 0)


@triton.jit
def _found(
    row, boxes, entries, num_boxes, far, there, TYPE: tl.constexpr, DIMS: tl.constexpr,
    CODES: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """(weights, box, there): elements so far from the first of their tiles, for `_get`."""
    if DIMS == 0:
        at = tl.load(row, mask=there, other=0)
        return at.to(tl.pointer_type(TYPE)) + far, boxes, there & (at != 0)
    else:
        there &= tl.load(row + 9, mask=there, other=0) == CODES
        position = tl.load(row + 8, mask=there, other=0) + far
        first = tl.load(row + 10, mask=there, other=0)
        count = tl.load(row + 11, mask=there, other=0)
        place, box, left = tl.zeros_like(position), tl.zeros_like(position), there
        nth, most = 0, tl.max(count).to(tl.int32)
        while nth < most:
            here = left & (nth < count)
            entry = tl.load(entries + first + nth, mask=here, other=0).to(tl.int64)
            where, inside = _inside(boxes + entry, num_boxes, position, here, DIMS, SMALL)
            place, box = tl.where(inside, where, place), tl.where(inside, entry, box)
            left &= inside == 0
            nth += 1
        there &= left == 0
        if CODES:
            return place, boxes + box, there
        else:
            at = tl.load(boxes + box, mask=there, other=0)
            return at.to(tl.pointer_type(TYPE)) + place, boxes + box, there


@triton.jit
def _is_here(row, DIMS: tl.constexpr, CODES: tl.constexpr):
    """Whether a tile is one of those that a launch looks for."""
    if DIMS == 0:
        return tl.load(row) != 0
    else:
        return tl.load(row + 9) == CODES


@triton.jit
def _get(
    weights, box, num_boxes, there, TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Bits of elements: at pointers, or with CODES at places from their boxes' addresses on."""
    if CODES:
        words = tl.load(box, mask=there, other=0).to(tl.pointer_type(tl.uint32))
        bits = tl.zeros_like(weights).to(TYPE)
        for code in tl.static_range(CODES):
            apart = tl.load(box + (2 + 3 * DIMS + code) * num_boxes, mask=there, other=0)
            place = weights + apart
            word = tl.load(words + (place >> 3), mask=there, other=0)
            own = (word >> ((place & 7) * 4).to(tl.uint32)) & 15
            bits |= own.to(TYPE) << (4 * code)
    else:
        bits = tl.load(weights, mask=there, other=0)
    return bits


@triton.jit
def _put(
    weights, box, num_boxes, there, new, TYPE: tl.constexpr, DIMS: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Overwrite elements, as `_get` takes them."""
    if CODES:
        old = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
        words = tl.load(box, mask=there, other=0).to(tl.pointer_type(tl.int32))
        for code in tl.static_range(CODES):
            apart = tl.load(box + (2 + 3 * DIMS + code) * num_boxes, mask=there, other=0)
            place = weights + apart
            change = ((new >> (4 * code)) & 15).to(tl.int32) - ((old >> (4 * code)) & 15).to(
                tl.int32
            )
            change = change << ((place & 7) * 4).to(tl.int32)
            tl.atomic_add(words + (place >> 3), change, mask=there & (change != 0), sem="relaxed")
    else:
        tl.store(weights, new, mask=there)


@triton.jit
def _tile(
    table, boxes, entries, num_boxes, tile, row, offset, numel,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """(weights, box, there, rows, far, seeds) of a part of a tile, as `_get` takes them."""
    there, rows = offset < numel, row + tl.zeros_like(offset)
    if DIMS == 0 and ODD == 0:  # one run, which wide loads may read
        at, key = tl.load(row), tl.load(row + 1).to(tl.uint64, bitcast=True)
        run = at.to(tl.pointer_type(TYPE))
        if ALIGNED:
            run = tl.multiple_of(run, 16)
        seeds = seed_of(key, offset)
        return run + offset, boxes, there & (at != 0), rows, offset, seeds
    else:
        far = far_from(rows, offset, there, ODD)
        at = far if ODD == _PARAMETERS or DIMS > 0 else offset
        weights, box, there = _found(
            rows, boxes, entries, num_boxes, at, there, TYPE, DIMS, CODES, SMALL
        )
        return weights, box, there, rows, far, seeds_of(rows, far, there)


@triton.jit
def _change(
    weights, box, num_boxes, there, values, old_values, sums, gains, row, far, seeds,
    DOES: tl.constexpr, TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr,
    ODD: tl.constexpr, IN_ONE: tl.constexpr,
):  # fmt: skip
    """What `change` does, of elements as `_get` takes them.

    IN_ONE: All are of one chunk, that of `row`.
    """
    nth = tl.program_id(0) % _ACCUMULATORS
    if DOES == _READ_BACK:
        found = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
        add_up(gains, nth, tl.where(there, mix(seeds, found), 0))
    else:
        new = tl.load(values, mask=there, other=0).to(TYPE, bitcast=True)
        if DOES != _WRITE:
            old = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
            gained = tl.where(there, mix(seeds, new), 0)
            lost = tl.where(there, mix(seeds, old), 0)
            add_up(gains, nth, gained)
            add_up(gains, _ACCUMULATORS + nth, lost)
            if IN_ONE:
                add_up(sums, tl.load(row + 3).to(tl.int32), gained - lost)
            else:
                add_by_chunk(sums, row, far, there, gained - lost, ODD)
        if DOES == _PREDICT:
            bits = old.to(old_values.dtype.element_ty, bitcast=True)
            tl.store(old_values, bits, mask=there)
        else:
            _put(weights, box, num_boxes, there, new, TYPE, DIMS, CODES)


@triton.jit(do_not_specialize=["num_boxes"])
def digest(
    table, boxes, entries, num_boxes, tiles, places, sums,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Add digests of int32[n] tiles up, each into its place among `sums`, an int32[n]."""
    PARTS: tl.constexpr = 4096 // SPAN
    item = tl.program_id(0) // PARTS
    tile = tl.load(tiles + item)
    row = table + tile.to(tl.int64) * WIDTH
    numel = tl.load(row + 2).to(tl.int32)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    if _is_here(row, DIMS, CODES):
        offset = tl.program_id(0) % PARTS * SPAN + tl.arange(0, SPAN)
        weights, box, there, _, _, seeds = _tile(
            table, boxes, entries, num_boxes, tile, row, offset, numel,
            TYPE, DIMS, CODES, ODD, ALIGNED, WIDTH, SMALL,
        )  # fmt: skip
        bits = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
        add_up(sums, tl.load(places + item), tl.where(there, mix(seeds, bits), 0))


@triton.jit(do_not_specialize=["num_boxes", "num_lanes"])
def change(
    table, boxes, entries, num_boxes, tile_of, places, values, old_values, flag, sums, gains,
    num_lanes,
    DOES: tl.constexpr, TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr,
    ODD: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Change lanes, tell what that would do, or look at what is there.

    Does nothing if the flag is raised.

    Args:
        values: int[N]: new bits. `READ_BACK` does not take them.
        old_values: int[N]: where `PREDICT` keeps the bits that would be replaced.
        flag: See `tiles.unpack`.
        sums: int64[chunks]: by how much `PREDICT` and `REPLACE` change digests.
        gains: int64[2, ACCUMULATORS]: digests of new, and of old bits; of `READ_BACK`,
            int64[ACCUMULATORS]: digests of what is there.
        DOES: `PREDICT`, `WRITE`, `REPLACE` or `READ_BACK`.
    """
    if tl.load(flag) == _CLEAR:
        lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
        there = lane < num_lanes
        tile, place = lane_at(tile_of, places, lane, there)
        row = table + tile.to(tl.int64) * WIDTH
        far, seeds = place, place
        if DOES != _WRITE or ODD == _PARAMETERS or DIMS > 0:
            far = far_from(row, place, there, ODD)
        if DOES != _WRITE:
            seeds = seeds_of(row, far, there)
        at = far if ODD == _PARAMETERS or DIMS > 0 else place
        weights, box, there = _found(
            row, boxes, entries, num_boxes, at, there, TYPE, DIMS, CODES, SMALL
        )
        is_any = True
        if DIMS > 0:
            is_any = tl.max(there.to(tl.int32)) > 0
        if is_any:
            _change(
                weights, box, num_boxes, there, values + lane, old_values + lane, sums, gains, row,
                far, seeds, DOES, TYPE, DIMS, CODES, ODD, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_boxes"])
def change_whole(
    table, boxes, entries, num_boxes, whole, values, old_values, flag, sums, gains,
    DOES: tl.constexpr, TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr,
    ODD: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """The same of whole tiles. Programs go over all parts, however many these are."""
    if tl.load(flag) == _CLEAR:
        item, last = tl.program_id(0), tl.load(whole) * (4096 // SPAN)
        while item < last:
            tile, row, offset, numel, begin = whole_at(table, whole, item, WIDTH, ALIGNED, SPAN)
            if _is_here(row, DIMS, CODES):
                weights, box, there, rows, far, seeds = _tile(
                    table, boxes, entries, num_boxes, tile, row, offset, numel,
                    TYPE, DIMS, CODES, ODD, ALIGNED, WIDTH, SMALL,
                )  # fmt: skip
                of = rows if ODD else row
                _change(
                    weights, box, num_boxes, there, values + begin + offset,
                    old_values + begin + offset, sums, gains, of, far, seeds,
                    DOES, TYPE, DIMS, CODES, ODD, ODD == 0,
                )  # fmt: skip
            item += tl.num_programs(0)
