"""Kernels over tiles in memory: digests, what changes would do, and their writing.

What holds for kernels of `tiles` holds here. Weights that lie in one run are found by the address
in the table alone. Others are found through *boxes*: int64[2 + 3 * DIMS + 16, num_boxes], the
address of a box's first element, its flat position in the parameter, and of each dimension size,
distance of positions and distance in memory, in elements. The table has for each tile the flat
position of its first element, `BOXES` or `CODES`, and which of `entries`, int32[n], are the boxes
that it meets: the first, and how many.

With CODES, an element is so many codes of 4 bits, each at a place of its own: see `Spread`. Then
the address is that of the storage, and distances in memory are in codes. The last numbers of a box
say how much farther each code of an element is. A write adds, to the word that has a code, how much
the code changes. So programs that write other codes of the same word do not disturb each other.

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
from deltasync.delta.kernels.triton_base import GOLDEN, add_up, mix

ACCUMULATORS = 64
"""Over how many places sums of all programs are spread, to keep atomics apart."""

BOXES, CODES = 1, 2
"""Of tiles that lie in no run."""

MOST_CODES = 16
"""Of 4 bits, in an element of 8 bytes."""

_ACCUMULATORS, _CLEAR = tl.constexpr(ACCUMULATORS), tl.constexpr(CLEAR)
_PARAMETERS = tl.constexpr(PARAMETERS)
_BOXES, _CODES = tl.constexpr(BOXES), tl.constexpr(CODES)


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
        there &= tl.load(row + 9, mask=there, other=0) == (_CODES if CODES else _BOXES)
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
        return tl.load(row + 9) == (_CODES if CODES else _BOXES)


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
        seeds = key + offset.to(tl.uint64) * GOLDEN
        return run + offset, boxes, there & (at != 0), rows, offset, seeds
    else:
        far = far_from(rows, offset, there, ODD)
        at = far if ODD == _PARAMETERS or DIMS > 0 else offset
        weights, box, there = _found(
            rows, boxes, entries, num_boxes, at, there, TYPE, DIMS, CODES, SMALL
        )
        return weights, box, there, rows, far, seeds_of(rows, far, there)


@triton.jit
def _account(sums, gains, row, far, there, gained, lost, ODD: tl.constexpr, IN_ONE: tl.constexpr):
    """Add digests of new and of old bits up, and by chunk what they change.

    IN_ONE: All are of one chunk, that of `row`.
    """
    gained, lost = tl.where(there, gained, 0), tl.where(there, lost, 0)
    nth = tl.program_id(0) % _ACCUMULATORS
    add_up(gains, nth, gained)
    add_up(gains, _ACCUMULATORS + nth, lost)
    if IN_ONE:
        add_up(sums, tl.load(row + 3).to(tl.int32), gained - lost)
    else:
        add_by_chunk(sums, row, far, there, gained - lost, ODD)


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
def predict(
    table, boxes, entries, num_boxes, tile_of, places, values, old_values, flag, sums, gains,
    num_lanes,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    WIDTH: tl.constexpr, SMALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Keep the bits that lanes replace, and tell by how much they change digests.

    Does nothing if the flag is raised.

    Args:
        flag: See `tiles.unpack`.
        sums: int64[chunks]: by how much digests change.
        gains: int64[2, ACCUMULATORS]: digests of new, and of old bits.
    """
    if tl.load(flag) == _CLEAR:
        lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
        there = lane < num_lanes
        tile, place = lane_at(tile_of, places, lane, there)
        row = table + tile.to(tl.int64) * WIDTH
        far = far_from(row, place, there, ODD)
        weights, box, there = _found(
            row, boxes, entries, num_boxes, far, there, TYPE, DIMS, CODES, SMALL
        )
        is_any = True
        if DIMS > 0:
            is_any = tl.max(there.to(tl.int32)) > 0
        if is_any:
            new = tl.load(values + lane, mask=there, other=0).to(TYPE, bitcast=True)
            old = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
            bits = old.to(old_values.dtype.element_ty, bitcast=True)
            tl.store(old_values + lane, bits, mask=there)
            seed = seeds_of(row, far, there)
            _account(sums, gains, row, far, there, mix(seed, new), mix(seed, old), ODD, False)


@triton.jit(do_not_specialize=["num_boxes"])
def predict_whole(
    table, boxes, entries, num_boxes, whole, values, old_values, flag, sums, gains,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The same of whole tiles. Programs go over all parts, however many these are."""
    if tl.load(flag) == _CLEAR:
        item, last = tl.program_id(0), tl.load(whole) * (4096 // SPAN)
        while item < last:
            tile, row, offset, numel, begin = whole_at(table, whole, item, WIDTH, ALIGNED, SPAN)
            if _is_here(row, DIMS, CODES):
                weights, box, there, rows, far, seed = _tile(
                    table, boxes, entries, num_boxes, tile, row, offset, numel,
                    TYPE, DIMS, CODES, ODD, ALIGNED, WIDTH, SMALL,
                )  # fmt: skip
                new = tl.load(values + begin + offset, mask=there, other=0).to(TYPE, bitcast=True)
                old = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
                bits = old.to(old_values.dtype.element_ty, bitcast=True)
                tl.store(old_values + begin + offset, bits, mask=there)
                of = rows if ODD else row
                _account(sums, gains, of, far, there, mix(seed, new), mix(seed, old), ODD, ODD == 0)
            item += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_boxes", "num_lanes"])
def write(
    table, boxes, entries, num_boxes, tile_of, places, values, flag, num_lanes,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    WIDTH: tl.constexpr, SMALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write lanes, unless the flag is raised."""
    if tl.load(flag) == _CLEAR:
        lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
        there = lane < num_lanes
        tile, place = lane_at(tile_of, places, lane, there)
        row = table + tile.to(tl.int64) * WIDTH
        at = place
        if ODD == _PARAMETERS or DIMS > 0:
            at = far_from(row, place, there, ODD)
        weights, box, there = _found(
            row, boxes, entries, num_boxes, at, there, TYPE, DIMS, CODES, SMALL
        )
        is_any = True
        if DIMS > 0:
            is_any = tl.max(there.to(tl.int32)) > 0
        if is_any:
            new = tl.load(values + lane, mask=there, other=0).to(TYPE, bitcast=True)
            _put(weights, box, num_boxes, there, new, TYPE, DIMS, CODES)


@triton.jit(do_not_specialize=["num_boxes"])
def write_whole(
    table, boxes, entries, num_boxes, whole, values, flag,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The same of whole tiles."""
    if tl.load(flag) == _CLEAR:
        item, last = tl.program_id(0), tl.load(whole) * (4096 // SPAN)
        while item < last:
            tile, row, offset, numel, begin = whole_at(table, whole, item, WIDTH, ALIGNED, SPAN)
            if _is_here(row, DIMS, CODES):
                weights, box, there, _, _, _ = _tile(
                    table, boxes, entries, num_boxes, tile, row, offset, numel,
                    TYPE, DIMS, CODES, ODD, ALIGNED, WIDTH, SMALL,
                )  # fmt: skip
                new = tl.load(values + begin + offset, mask=there, other=0).to(TYPE, bitcast=True)
                _put(weights, box, num_boxes, there, new, TYPE, DIMS, CODES)
            item += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_boxes", "num_lanes"])
def read_back(
    table, boxes, entries, num_boxes, tile_of, places, flag, gains, num_lanes,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    WIDTH: tl.constexpr, SMALL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add up the digests of what is there now at lanes, unless the flag is raised.

    gains: int64[ACCUMULATORS].
    """
    if tl.load(flag) == _CLEAR:
        lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
        there = lane < num_lanes
        tile, place = lane_at(tile_of, places, lane, there)
        row = table + tile.to(tl.int64) * WIDTH
        far = far_from(row, place, there, ODD)
        at = far if ODD == _PARAMETERS or DIMS > 0 else place
        weights, box, there = _found(
            row, boxes, entries, num_boxes, at, there, TYPE, DIMS, CODES, SMALL
        )
        is_any = True
        if DIMS > 0:
            is_any = tl.max(there.to(tl.int32)) > 0
        if is_any:
            found = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
            gained = tl.where(there, mix(seeds_of(row, far, there), found), 0)
            add_up(gains, tl.program_id(0) % _ACCUMULATORS, gained)


@triton.jit(do_not_specialize=["num_boxes"])
def read_back_whole(
    table, boxes, entries, num_boxes, whole, flag, gains,
    TYPE: tl.constexpr, DIMS: tl.constexpr, CODES: tl.constexpr, ODD: tl.constexpr,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The same of whole tiles."""
    if tl.load(flag) == _CLEAR:
        item, last = tl.program_id(0), tl.load(whole) * (4096 // SPAN)
        while item < last:
            tile, row, offset, numel, _begin = whole_at(table, whole, item, WIDTH, ALIGNED, SPAN)
            if _is_here(row, DIMS, CODES):
                weights, box, there, _, _, seed = _tile(
                    table, boxes, entries, num_boxes, tile, row, offset, numel,
                    TYPE, DIMS, CODES, ODD, ALIGNED, WIDTH, SMALL,
                )  # fmt: skip
                found = _get(weights, box, num_boxes, there, TYPE, DIMS, CODES)
                gained = tl.where(there, mix(seed, found), 0)
                add_up(gains, tl.program_id(0) % _ACCUMULATORS, gained)
            item += tl.num_programs(0)
