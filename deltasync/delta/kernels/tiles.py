"""Kernels in Triton over tiles that find what changed, pack it, and open what was packed.

Those of `tiles_live` check and write. All go over many tiles in one launch.

What kernels know of a tile is a row of a table, int64[tiles, WIDTH]: the address of its first
element in the copy, or among live weights (0 if it is in no run); the digest seed of that element;
how many elements it has; and its place in the sums of a ledger. With ODD, four more: how many
elements of its row in the parameter come before it, how many a row has, how many elements of the
parameter lie between two rows, and how many of its chunk come before it. With DIMS, four more: see
`tiles_live`.

ODD: 0 if shares are runs, and no tile reaches into another chunk. `SHARES`: a share has gaps, which
digests count; the copy has none. `PARAMETERS`: elements lie in live weights, of which a share is
rows, and a ledger has chunks of whole parameters.

A *lane* is one changed element: `tile_of` says in which tile, `places` where there. The caller
makes the device current; nothing waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels import reads
from deltasync.delta.kernels.triton_base import (
    add_up,
    aligned,
    load,
    mix,
    popcount,
    seed_of,
)

GROUP = 4
"""Tiles whose masks one program of `locate` reads."""

LANES = 1024
"""Changed elements that one program goes over."""

SPAN, BOX_SPAN = 1024, 256
"""Elements of a whole tile that one program goes over, and of one in boxes: more would not fit into
registers.
"""

SHARES, PARAMETERS = 1, 2
"""What ODD may be."""

CLEAR = (1 << 31) - 1
"""What a flag holds while nothing is bad. Otherwise the least of:"""

UNSORTED, MISCOUNTED, MISPLACED = 0, 1, 2
"""Tiles are out of range, unsorted or repeated; counts do not add up to what the payload has;
places are out of range, unsorted or repeated: the flag's second number says in which chunk.
"""

TILE = tl.constexpr(4096)
WORDS = tl.constexpr(128)
"""Words of a tile's mask: 32 elements each."""

_AS_IS, _ROUNDED, _COMPUTED = (
    tl.constexpr(reads.AS_IS),
    tl.constexpr(reads.ROUNDED),
    tl.constexpr(reads.COMPUTED),
)
_PARAMETERS = tl.constexpr(PARAMETERS)
_UNSORTED, _MISCOUNTED, _MISPLACED = (
    tl.constexpr(UNSORTED),
    tl.constexpr(MISCOUNTED),
    tl.constexpr(MISPLACED),
)
_CHUNK_BITS = tl.constexpr(18)


@triton.jit
def _marks(new_at, old_at, numel, SIZE: tl.constexpr, FULL: tl.constexpr):
    """The mask words of a tile that begins at multiples of 16 bytes: by 4 bytes or more at once."""
    EACH: tl.constexpr = 4 // SIZE if SIZE < 4 else 1  # elements in a word
    WORD: tl.constexpr = tl.uint64 if SIZE == 8 else tl.uint32
    new = tl.multiple_of(new_at.to(tl.pointer_type(WORD)), 16)
    old = tl.multiple_of(old_at.to(tl.pointer_type(WORD)), 16)
    column = tl.arange(0, 32 // EACH)[None, :]
    where = tl.arange(0, WORDS)[:, None] * (32 // EACH) + column
    if FULL:
        x = tl.load(new + where) ^ tl.load(old + where)
    else:  # an aligned word of which one element is there can be read
        there = where * EACH < numel
        x = tl.load(new + where, mask=there, other=0) ^ tl.load(old + where, mask=there, other=0)
    found = tl.zeros_like(where).to(tl.uint32)
    for nth in tl.static_range(EACH):
        differ = (x & (((1 << (8 * SIZE)) - 1) << (8 * SIZE * nth))) != 0 if EACH > 1 else x != 0
        if not FULL:
            differ = differ & (where * EACH + nth < numel)
        found |= differ.to(tl.uint32) << nth
    return tl.sum(found << (column * EACH), axis=1)


@triton.jit(do_not_specialize=["first", "num_tiles"])
def compare(
    table, new_at, ahead, these, words, plan, changed, first, num_tiles,
    TYPE: tl.constexpr, READ: tl.constexpr, ALIGNED: tl.constexpr, SOME: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A mask of each tile from `first` on, and what the tile takes of payloads.

    Args:
        new_at: int64[tiles]: addresses in the source.
        ahead: uint8[tiles]: which go whole, whatever differs.
        these: int32[n]: which tiles, counted from `first`, with SOME.
        words: int32[num_tiles, WORDS]: masks. They are there already if READ computes them.
        plan: int64[4, num_tiles]: whether a tile goes at all; its changes, if they go; its
            elements, padded, if it goes whole; whether it does.
        changed: int32[num_tiles]: elements that differ; all, of a tile that is ahead.
        ALIGNED: Tiles begin at multiples of 16 bytes on both sides.
    """
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    EACH: tl.constexpr = 16 // SIZE
    nth = tl.program_id(0)
    if SOME:
        nth = tl.load(these + nth)
    tile = first + nth
    row = table + tile.to(tl.int64) * WIDTH
    numel, forced = tl.load(row + 2).to(tl.int32), tl.load(ahead + tile) != 0
    word = tl.arange(0, WORDS)
    at = words + nth.to(tl.int64) * WORDS + word
    if READ >= _COMPUTED:
        found = tl.load(at, mask=word * 32 < numel, other=0).to(tl.uint32, bitcast=True)
    else:
        new, old = tl.load(new_at + tile), tl.load(row)
        if ALIGNED and READ == _AS_IS:
            if numel == TILE:
                found = _marks(new, old, numel, SIZE, True)
            else:
                found = _marks(new, old, numel, SIZE, False)
        else:
            column = tl.arange(0, 32)[None, :]
            where = word[:, None] * 32 + column
            there = where < numel
            news = load(new, where, there, TYPE, READ == _ROUNDED, False)
            differ = news != load(old, where, there, TYPE, False, False)
            found = tl.sum(differ.to(tl.uint32) << column, axis=1)
    tl.store(at, found.to(tl.int32, bitcast=True))
    count = tl.where(forced, numel, tl.sum(popcount(found)))
    is_whole = count * (2 + SIZE) > numel * SIZE
    length = (numel + EACH - 1) // EACH * EACH
    tl.store(changed + nth, count)
    tl.store(plan + nth, (count > 0).to(tl.int64))
    tl.store(plan + num_tiles + nth, tl.where(is_whole, 0, count).to(tl.int64))
    tl.store(plan + 2 * num_tiles + nth, tl.where(is_whole, length, 0).to(tl.int64))
    tl.store(plan + 3 * num_tiles + nth, is_whole.to(tl.int64))


@triton.jit(do_not_specialize=["first", "num_tiles", "low", "high"])
def locate(
    words, plan, ends, tiles, counts, places, tile_of, whole, first, num_tiles, low, high,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The table of a payload with the tiles [low, high), counted from `first`; where changes are.

    Args:
        words, plan: As of `compare`.
        ends: int64[4 * num_tiles + 1]: sums of all of `plan` before.
        tiles, counts, places: Columns of the payload.
        tile_of: int32[N].
        whole: int32[2 * (1 + whole tiles)]: how many there are, at its beginning; then of each
            its number, and where it begins in the column.
    """
    nth = low + tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    live = nth < high
    live &= tl.load(plan + nth, mask=live, other=0) > 0
    whole_before = tl.load(ends + 3 * num_tiles + low)
    if tl.program_id(0) == 0:
        tl.store(whole, (tl.load(ends + 3 * num_tiles + high) - whole_before).to(tl.int32))
    if tl.max(live.to(tl.int32)) > 0:
        count = tl.load(plan + num_tiles + nth, mask=live, other=0).to(tl.int32)
        row = (tl.load(ends + nth, mask=live, other=0) - tl.load(ends + low)).to(tl.int32)
        tl.store(tiles + row, first + nth, mask=live)
        tl.store(counts + row, count.to(tl.int16), mask=live)
        goes = live & (tl.load(plan + 3 * num_tiles + nth, mask=live, other=0) > 0)
        to = tl.load(ends + 3 * num_tiles + nth, mask=goes, other=0) - whole_before
        begin = tl.load(ends + 2 * num_tiles + nth, mask=goes, other=0)
        begin -= tl.load(ends + 2 * num_tiles + low)
        tl.store(whole + 2 * to + 2, first + nth, mask=goes)
        tl.store(whole + 2 * to + 3, begin.to(tl.int32), mask=goes)
        column = tl.arange(0, WORDS)[None, :]
        at = nth.to(tl.int64)[:, None] * WORDS + column
        left = tl.load(words + at, mask=(count > 0)[:, None], other=0).to(tl.uint32, bitcast=True)
        found = popcount(left)
        begin = tl.load(ends + num_tiles + nth, mask=live, other=0) - tl.load(
            ends + num_tiles + low
        )
        begin = begin.to(tl.int32)[:, None]
        # In runs: beside each place, wherever that goes, takes twice as long if many change.
        step, most = column, tl.max(count)
        tile = tl.zeros_like(begin + column) + (first + nth)[:, None]
        while most > 0:
            tl.store(tile_of + begin + step, tile, mask=step < count[:, None])
            step += WORDS
            most -= WORDS
        lane = begin + tl.cumsum(found, axis=1) - found
        rounds = tl.max(found)
        while rounds > 0:
            there = left != 0
            place = column * 32 + popcount((left & (0 - left)) - 1)
            tl.store(places + lane, place.to(tl.int16), mask=there)
            lane += there.to(tl.int32)
            left = left & (left - 1)
            rounds -= 1


@triton.jit
def lane_at(tile_of, places, lane, there):
    """(tile, place) of lanes."""
    place = tl.load(places + lane, mask=there, other=0).to(tl.int32) & 0xFFFF
    return tl.load(tile_of + lane, mask=there, other=0), place


@triton.jit
def far_from(row, place, there, ODD: tl.constexpr):
    """How far elements are from the first one of their tile, in the parameter."""
    far = place
    if ODD:
        before = tl.load(row + 4, mask=there, other=0).to(tl.uint32)
        cols = tl.load(row + 5, mask=there, other=1).to(tl.uint32)
        gap = tl.load(row + 6, mask=there, other=0)
        far = place + ((before + place.to(tl.uint32)) // cols).to(tl.int64) * gap
    return far


@triton.jit
def seeds_of(row, far, there):
    """Digest seeds of elements so far from the first one of their tile."""
    return seed_of(tl.load(row + 1, mask=there, other=0).to(tl.uint64, bitcast=True), far)


@triton.jit
def add_by_chunk(sums, row, far, there, terms, ODD: tl.constexpr):
    """Add terms up into the places of the chunks that elements so far from their tiles lie in."""
    chunk = tl.load(row + 3, mask=there, other=0).to(tl.int32)
    if ODD == _PARAMETERS:
        chunk += ((tl.load(row + 7, mask=there, other=0) + far) >> _CHUNK_BITS).to(tl.int32)
    one, last = tl.min(tl.where(there, chunk, 0x7FFFFFFF)), tl.max(tl.where(there, chunk, -1))
    if last >= 0:
        while one < last:
            add_up(sums, one, tl.where(there & (chunk == one), terms, 0))
            one = tl.min(tl.where(there & (chunk > one), chunk, last))
        add_up(sums, last, tl.where(there & (chunk == last), terms, 0))


@triton.jit
def _read(
    new_at, computed, tile, offsets, there, TYPE: tl.constexpr, READ: tl.constexpr,
    CODES_AT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Bits that are sent of elements of tiles, whatever the source keeps.

    Args:
        new_at: Where the address of the first one in the source stands.
        computed: int64[tiles, 4]: how codes are computed, see `Masks.columns`, and where tiles
            begin in their parameters.
        tile, offsets, there: Which elements.
        TYPE: Of the bits.
        READ: See `reads`.
        CODES_AT: What computes codes, see `Masks.codes_at`.
    """
    address = tl.load(new_at)
    if READ < _COMPUTED:
        bits = load(address, offsets, there, TYPE, READ == _ROUNDED, ALIGNED)
    else:
        own = computed + tile.to(tl.int64) * 4
        bits = CODES_AT(address, offsets, there, tl.load(own + 3), own, TYPE, READ)
    return bits


@triton.jit(do_not_specialize=["num_lanes"])
def collect(
    table, new_at, reads_of, computed, tile_of, places, values, sums, num_lanes,
    TYPE: tl.constexpr, READ: tl.constexpr, CODES_AT: tl.constexpr, SOME: tl.constexpr,
    OVERWRITES: tl.constexpr, ODD: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """New values of lanes, and by how much they change digests.

    SOME: Only those of tiles that are read in this way.
    OVERWRITES: The copy gets them too.
    """
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = lane < num_lanes
    tile, place = lane_at(tile_of, places, lane, there)
    if SOME:
        there &= tl.load(reads_of + tile, mask=there, other=-1) == READ
    if tl.max(there.to(tl.int32)) > 0:
        if READ >= _COMPUTED:  # which follows addresses, also of lanes that are left out
            tile = tl.where(there, tile, tl.max(tl.where(there, tile, 0)))
        row = table + tile.to(tl.int64) * WIDTH
        new = _read(new_at + tile, computed, tile, place, there, TYPE, READ, CODES_AT, False)
        old_at = tl.load(row, mask=there, other=0).to(tl.pointer_type(TYPE))
        old = tl.load(old_at + place, mask=there, other=0)
        tl.store(values + lane, new.to(values.dtype.element_ty, bitcast=True), mask=there)
        if OVERWRITES:
            tl.store(old_at + place, new, mask=there)
        far = far_from(row, place, there, ODD)
        seed = seeds_of(row, far, there)
        change = tl.where(there, mix(seed, new) - mix(seed, old), 0)
        add_by_chunk(sums, row, far, there, change, ODD)


@triton.jit
def whole_at(table, whole, item, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr):
    """(tile, row, offsets, numel, begin) of a part of a whole tile."""
    PARTS: tl.constexpr = TILE // SPAN
    entry = whole + 2 + 2 * (item // PARTS)
    tile, begin = tl.load(entry), tl.multiple_of(tl.load(entry + 1), 2)
    row = table + tile.to(tl.int64) * WIDTH
    numel = tl.load(row + 2).to(tl.int32)
    if ALIGNED:
        numel, begin = tl.multiple_of(numel, 16), tl.multiple_of(begin, 16)
    return tile, row, item % PARTS * SPAN + tl.arange(0, SPAN), numel, begin


@triton.jit
def copy_whole(
    table, new_at, reads_of, computed, whole, values, sums,
    TYPE: tl.constexpr, READ: tl.constexpr, CODES_AT: tl.constexpr, SOME: tl.constexpr,
    OVERWRITES: tl.constexpr, ODD: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """The same of tiles that go whole. A program has one part of one.

    ALIGNED: All tiles begin at multiples of 16 bytes on both sides, and have a multiple of 16
        elements.
    """
    EACH: tl.constexpr = 16 // (TYPE.primitive_bitwidth // 8)
    tile, row, offset, numel, begin = whole_at(table, whole, tl.program_id(0), WIDTH, ALIGNED, SPAN)
    is_here = True
    if SOME:
        is_here = tl.load(reads_of + tile) == READ
    if is_here:
        there = offset < numel
        new = _read(new_at + tile, computed, tile, offset, there, TYPE, READ, CODES_AT, ALIGNED)
        old_at = aligned(tl.load(row), TYPE, ALIGNED) + offset
        old = tl.load(old_at, mask=there, other=0)
        if OVERWRITES:
            tl.store(old_at, new, mask=there)
        padded = offset < (numel if ALIGNED else (numel + EACH - 1) // EACH * EACH)
        bits = tl.where(there, new, 0).to(values.dtype.element_ty, bitcast=True)
        tl.store(values + begin + offset, bits, mask=padded)
        far = far_from(row + tl.zeros_like(offset), offset, there, ODD)
        seed = seed_of(tl.load(row + 1).to(tl.uint64, bitcast=True), far)
        change = tl.where(there, mix(seed, new) - mix(seed, old), 0)
        add_up(sums, tl.load(row + 3).to(tl.int32), change)


@triton.jit
def raise_flag(flag, bad, what: tl.constexpr):
    """Say that something is bad, unless it is known of something that comes before it."""
    if tl.max(bad.to(tl.int32)) > 0:
        tl.atomic_min(flag, what, sem="relaxed")


@triton.jit(do_not_specialize=["first", "stop", "num_rows"])
def unpack(
    table, tiles, counts, plan, flag, after, first, stop, num_rows,
    EACH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Check the tiles of a payload, and what each takes of it.

    Args:
        tiles, counts: Columns of the payload.
        plan: int64[3, num_rows]: the last three rows of that of `compare`.
        flag: int32[2]: what is bad, see `CLEAR`.
        after: int32[1]: the last tile of the payload before.
        first, stop: Tiles that may come.
        EACH: Elements in 16 bytes.
    """
    nth = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = nth < num_rows
    tile = tl.load(tiles + nth, mask=there, other=0)
    before = tl.load(tiles + nth - 1, mask=there & (nth > 0), other=0)
    before = tl.where(nth > 0, before, tl.load(after))
    good = there & (tile > before) & (tile >= first) & (tile < stop)
    numel = tl.load(table + tile.to(tl.int64) * WIDTH + 2, mask=good, other=0)
    count = tl.load(counts + nth, mask=there, other=0).to(tl.int64) & 0xFFFF
    good &= count <= numel
    raise_flag(flag, there & (good == 0), _UNSORTED)
    is_whole = good & (count == 0)
    tl.store(plan + nth, tl.where(good, count, 0), mask=there)
    length = tl.where(is_whole, (numel + EACH - 1) // EACH * EACH, 0)
    tl.store(plan + num_rows + nth, length, mask=there)
    tl.store(plan + 2 * num_rows + nth, is_whole.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["num_rows", "num_lanes", "num_values"])
def expand(
    table, tiles, plan, ends, places, tile_of, whole, flag, after, num_rows, num_lanes, num_values,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`tile_of` and `whole`, as `locate` has them, of a payload that `unpack` has seen.

    ends: int64[3 * num_rows + 1]: sums of all of `plan` before.
    Places that are bad raise the flag; so do lanes and values that are too many or too few.
    """
    nth = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = nth < num_rows
    tile = tl.load(tiles + nth, mask=live, other=0)
    count = tl.load(plan + nth, mask=live, other=0).to(tl.int32)
    begin = tl.load(ends + nth, mask=live, other=0)
    length = tl.load(plan + num_rows + nth, mask=live, other=0)
    at = tl.load(ends + num_rows + nth, mask=live, other=0) - tl.load(ends + num_rows)
    last = nth == num_rows - 1
    stop, end = begin + count, at + length
    wrong = (stop > num_lanes) | (end > num_values)
    wrong |= last & ((stop != num_lanes) | (end != num_values))
    raise_flag(flag, live & wrong, _MISCOUNTED)
    tl.store(after + tl.zeros_like(tile), tile, mask=last)
    whole_before = tl.load(ends + 2 * num_rows)
    if tl.program_id(0) == 0:
        tl.store(whole, (tl.load(ends + 3 * num_rows) - whole_before).to(tl.int32))
    goes = live & (wrong == 0) & (tl.load(plan + 2 * num_rows + nth, mask=live, other=0) > 0)
    to = 2 * (tl.load(ends + 2 * num_rows + nth, mask=goes, other=0) - whole_before) + 2
    tl.store(whole + to, tile, mask=goes)
    tl.store(whole + to + 1, at.to(tl.int32), mask=goes)
    numel = tl.load(table + tile.to(tl.int64) * WIDTH + 2, mask=live & (count > 0), other=0)
    tiles_of = tl.zeros([ROWS, LANES], tl.int32) + tile[:, None]
    done, most = 0, tl.max(count)
    while done < most:
        step = done + tl.arange(0, LANES)[None, :]
        lane = begin[:, None] + step
        there = (step < count[:, None]) & (lane < num_lanes)
        place = tl.load(places + lane, mask=there, other=0).to(tl.int32) & 0xFFFF
        before = tl.load(places + lane - 1, mask=there & (step > 0), other=0).to(tl.int32)
        before = tl.where(step > 0, before & 0xFFFF, -1)
        bad = there & ((place <= before) | (place >= numel[:, None]))
        raise_flag(flag, bad, _MISPLACED)
        if tl.max(bad.to(tl.int32)) > 0:
            one = tl.min(tl.where(bad, tiles_of, 0x7FFFFFFF)).to(tl.int64)
            tl.atomic_min(flag + 1, tl.load(table + one * WIDTH + 3).to(tl.int32), sem="relaxed")
        tl.store(tile_of + lane, tiles_of, mask=there)
        done += LANES
