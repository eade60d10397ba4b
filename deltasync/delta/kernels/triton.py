"""Kernels in Triton: each goes over all parameters in one launch, through tables of addresses.

A *chunk* is described by columns that the launcher gets as tensors: the address of its first
element, its flat position in the parameter, its length, the digest seed of its parameter. Addresses
are those of device memory, of pinned host memory, or under Triton's interpreter of any host memory.
Sums of digests are 64-bit and wrap around, so that the order in which programs add does not matter.

The caller makes the device current; work goes to the current stream, nothing waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.wire.digest import GOLDEN_RATIO, MULTIPLIERS

BLOCK = 4096
"""Elements that one program looks at: 32 to a word of the mask."""

SEGMENT = 1024
"""Indices that one program checks or copies."""

PART = 256
"""Indices of a segment that one program writes to and reads back: one a thread."""

GROUP = 4
"""Blocks whose masks one program of `locate` reads."""

TILE = 64
"""Blocks whose changes one program of `collect` reads."""

SPAN = 1024
"""Elements that one program of a dense kernel goes over: more would not fit into registers."""

CLEAR = (1 << 31) - 1
"""What the flag of `check` holds while no row is bad."""

ACCUMULATORS = 64
"""Over how many places sums of all programs are spread, to keep atomics apart."""

TYPES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}

_GOLDEN = tl.constexpr(GOLDEN_RATIO)
_FIRST = tl.constexpr(MULTIPLIERS[0])
_SECOND = tl.constexpr(MULTIPLIERS[1])
_ACCUMULATORS = tl.constexpr(ACCUMULATORS)
_CLEAR = tl.constexpr(CLEAR)


@triton.jit
def _seed(key, position):
    """What `_mix` adds bits to. Linear: seeds of neighbours are `_GOLDEN` apart."""
    return key + position.to(tl.uint64) * _GOLDEN


@triton.jit
def _mix(seed, bits):
    """SplitMix64's finaliser of seed, position and bits: wire.digest.mix64."""
    x = seed + bits.to(tl.uint64)
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _add(sums, place, terms):
    """Add uint64 terms up into one place."""
    tl.atomic_add(sums + place, tl.sum(terms).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _rounded(raw):
    """bfloat16 bits of float32 bits, to the nearest even, as delta.bits does: one NaN."""
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return tl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def _load(address, offsets, mask, TYPE: tl.constexpr, NARROW: tl.constexpr):
    """Bits of the wire's type; NARROW reads float32 that goes as bfloat16."""
    if NARROW:
        raw = tl.load(address.to(tl.pointer_type(tl.uint32)) + offsets, mask=mask, other=0)
        return _rounded(raw)
    else:
        return tl.load(address.to(tl.pointer_type(TYPE)) + offsets, mask=mask, other=0)


@triton.jit
def _popcount(words):
    """Bits set in each uint32."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _pairs(new_at, old_at, offset, numel, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """The mask words of a block of 2-byte elements, compared two at a time."""
    new = tl.multiple_of(new_at.to(tl.pointer_type(tl.uint32)), 16)
    old = tl.multiple_of(old_at.to(tl.pointer_type(tl.uint32)), 16)
    column = tl.arange(0, 16)[None, :]
    pair = tl.arange(0, BLOCK // 32)[:, None] * 16 + column
    where = offset // 2 + pair
    if FULL:
        x = tl.load(new + where) ^ tl.load(old + where)
        low, high = (x & 0xFFFF) != 0, (x >> 16) != 0
    else:  # an aligned pair of which one element is there can be read
        there = where * 2 < numel
        x = tl.load(new + where, mask=there, other=0) ^ tl.load(old + where, mask=there, other=0)
        low, high = (x & 0xFFFF) != 0, ((x >> 16) != 0) & (where * 2 + 1 < numel)
    return tl.sum((low.to(tl.uint32) | (high.to(tl.uint32) << 1)) << (column * 2), axis=1)


@triton.jit(do_not_specialize=["begin"])
def compare(
    new_at, old_at, numels, first_block, chunk_of, words, counts, chunk_counts, begin,
    TYPE: tl.constexpr, NARROW: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A mask and a count for each block from `begin` on, and the counts added up by chunk.

    PAIRS: The elements have 2 bytes, and every chunk begins at a multiple of 16 on both sides.
    """
    block = begin + tl.program_id(0)
    chunk = tl.load(chunk_of + block)
    offset = (block - tl.load(first_block + chunk)) * BLOCK
    numel = tl.load(numels + chunk)
    new, old = tl.load(new_at + chunk), tl.load(old_at + chunk)
    if PAIRS:
        if offset + BLOCK <= numel:
            found = _pairs(new, old, offset, numel, True, BLOCK)
        else:
            found = _pairs(new, old, offset, numel, False, BLOCK)
    else:
        column = tl.arange(0, 32)[None, :]
        where = offset + tl.arange(0, BLOCK // 32)[:, None] * 32 + column
        there = where < numel
        differ = _load(new, where, there, TYPE, NARROW) != _load(old, where, there, TYPE, False)
        found = tl.sum(differ.to(tl.uint32) << column, axis=1)
    at = block.to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(words + at, found.to(tl.int32, bitcast=True))
    count = tl.sum(_popcount(found))
    tl.store(counts + block, count)
    if count > 0:
        tl.atomic_add(chunk_counts + chunk, count, sem="relaxed")


@triton.jit
def _add_by_chunk(digests, position, good, change, CHUNK: tl.constexpr):
    """Add terms up into the places of the chunks that their positions lie in."""
    chunk = (position // CHUNK).to(tl.int32)
    one, last = tl.min(tl.where(good, chunk, 0x7FFFFFFF)), tl.max(tl.where(good, chunk, -1))
    while one <= last:
        _add(digests, one, tl.where(chunk == one, change, 0))
        one += 1


@triton.jit(do_not_specialize=["capacity", "begin", "end", "out"])
def locate(
    first_block, chunk_of, shifts, words, ends, indices, capacity, begin, end, out,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Indices of the elements that the masks of blocks [begin, end) mark, one after another.

    They are relative to the origin of their chunk: an element of a chunk has the chunk's entry in
    `shifts` plus its place in the chunk. The first one goes to `out`. Blocks that `ends` leaves no
    room for are left out. Does nothing if all of them do not fit into `capacity`.
    """
    origin = tl.load(ends + begin) - out
    if tl.load(ends + end) - origin <= capacity:
        block = begin + tl.program_id(0) * GROUP + tl.arange(0, GROUP)
        live = block < end
        column = tl.arange(0, BLOCK // 32)[None, :]
        at = block.to(tl.int64)[:, None] * (BLOCK // 32) + column
        left = tl.load(words + at, mask=live[:, None], other=0).to(tl.uint32, bitcast=True)
        rank = tl.load(ends + block, mask=live, other=0)
        room = tl.load(ends + block + 1, mask=live, other=0) - rank
        left = tl.where(room[:, None] > 0, left, 0)
        chunk = tl.load(chunk_of + block, mask=live, other=0)
        offset = (block - tl.load(first_block + chunk)) * BLOCK + tl.load(shifts + chunk)
        found = _popcount(left)
        place = (rank - origin)[:, None] + tl.cumsum(found, axis=1) - found
        row = offset[:, None] + column * 32
        rounds = tl.max(found)
        while rounds > 0:
            there = left != 0
            where = row + _popcount((left & (0 - left)) - 1)
            tl.store(indices + place, where, mask=there)
            place += there.to(tl.int64)
            left = left & (left - 1)
            rounds -= 1


@triton.jit(do_not_specialize=["capacity", "begin_tile", "begin", "end", "out"])
def collect(
    new_at, old_at, starts, keys, shifts, tile_chunk, tile_block, ends, indices, values, changes,
    capacity, begin_tile, begin, end, out,
    TYPE: tl.constexpr, NARROW: tl.constexpr, AHEAD: tl.constexpr, STRIDE: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """New values of the elements that `locate` found, and by how much they change the digests.

    A program goes over a tile: blocks [tile_block[i], tile_block[i + 1]) of one chunk. Values go
    where indices are, STRIDE elements apart; with AHEAD to the snapshot too.
    """
    tile = begin_tile + tl.program_id(0)
    first, stop = tl.load(tile_block + tile), tl.load(tile_block + tile + 1)
    chunk = tl.load(tile_chunk + tile)
    origin = tl.load(ends + begin) - out
    rank = tl.load(ends + first)
    count = tl.load(ends + stop) - rank
    if (count > 0) & (tl.load(ends + end) - origin <= capacity):
        new_from, old_from = tl.load(new_at + chunk), tl.load(old_at + chunk)
        shift = tl.load(shifts + chunk)
        seed = _seed(tl.load(keys + chunk).to(tl.uint64, bitcast=True), tl.load(starts + chunk))
        change = tl.zeros((SEGMENT,), tl.uint64)
        done = 0
        while done < count:
            lane = done + tl.arange(0, SEGMENT)
            there = lane < count
            at = rank - origin + lane
            where = tl.load(indices + at, mask=there, other=shift) - shift
            new = _load(new_from, where, there, TYPE, NARROW)
            old = _load(old_from, where, there, TYPE, False)
            tl.store(values.to(tl.pointer_type(TYPE)) + at * STRIDE, new, mask=there)
            if AHEAD:
                tl.store(old_from.to(tl.pointer_type(TYPE)) + where, new, mask=there)
            one = _seed(seed, where)
            change += tl.where(there, _mix(one, new) - _mix(one, old), 0)
            done += SEGMENT
        _add(changes, chunk, change)


@triton.jit(do_not_specialize=["payload_bytes", "num_rows"])
def pack(
    rows, segment_row, segment_begin, indices, values, payload, payload_bytes, num_rows,
    TYPE: tl.constexpr, STRIDE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write sparse rows to a payload.

    rows: int64[7, num_rows]: where a row begins in `indices`; where its indices begin in the
        payload, in int32 units; where its values begin, in elements; their number; what to
        add to an index; what indices count from; address of the snapshot's parameter.
    """
    segment = tl.program_id(0)
    row = rows + tl.load(segment_row + segment)
    lane = tl.load(segment_begin + segment) + tl.arange(0, SEGMENT)
    begin, count = tl.load(row), tl.load(row + 3 * num_rows)
    there = lane < count
    index = tl.load(indices + begin + lane, mask=there, other=0) + tl.load(row + 4 * num_rows)
    source = values.to(tl.pointer_type(TYPE)) + (begin + lane) * STRIDE
    value = tl.load(source, mask=there, other=0)
    value_at = tl.load(row + 2 * num_rows)
    to_indices = payload.to(tl.pointer_type(tl.int32)) + tl.load(row + num_rows)
    to_values = payload.to(tl.pointer_type(TYPE)) + value_at
    # Blocks are padded with zeros to 8 bytes, but for the one that ends the payload.
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    is_last = (value_at + count) * SIZE == payload_bytes
    padded = tl.where(is_last, count, (count * SIZE + 7) // 8 * 8 // SIZE)
    index = tl.where(there, index, 0).to(tl.int32)
    tl.store(to_indices + lane, index, mask=lane < (count + 1) // 2 * 2)
    tl.store(to_values + lane, value, mask=lane < padded)


@triton.jit(do_not_specialize=["num_rows"])
def advance(
    rows, segment_row, segment_begin, indices, values, num_rows,
    TYPE: tl.constexpr, STRIDE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write the values of rows, as `pack` takes them, to the snapshot."""
    segment = tl.program_id(0)
    row = rows + tl.load(segment_row + segment)
    lane = tl.load(segment_begin + segment) + tl.arange(0, SEGMENT)
    there = lane < tl.load(row + 3 * num_rows)
    at = tl.load(row) + lane
    position = tl.load(row + 5 * num_rows) + tl.load(indices + at, mask=there, other=0)
    value = tl.load(values.to(tl.pointer_type(TYPE)) + at * STRIDE, mask=there, other=0)
    old = tl.load(row + 6 * num_rows).to(tl.pointer_type(TYPE))
    tl.store(old + position, value, mask=there)


@triton.jit
def _aligned(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer that the compiler knows to be fit for wide loads, if it is."""
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _length(at, ALIGNED: tl.constexpr):
    """A number of elements, of which the compiler knows that no wide load straddles it, if so."""
    length = tl.load(at)
    return tl.multiple_of(length, 16) if ALIGNED else length


@triton.jit(do_not_specialize=["num_pieces", "blocks_each"])
def pack_dense(
    new_at, old_at, starts, keys, pieces, payload, digests, num_pieces, blocks_each,
    TYPE: tl.constexpr, NARROW: tl.constexpr, AHEAD: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy pieces of chunks to a payload; with AHEAD to the snapshot, adding up their digests.

    pieces: int64[4, num_pieces]: chunk, first element in it, elements, where the first goes in the
        payload, in elements.
    ALIGNED: Each piece begins at multiples of 16 bytes, and has a multiple of 16 elements.
    """
    piece, block = tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    numel = _length(pieces + 2 * num_pieces + piece, ALIGNED)
    if block * BLOCK < numel:
        chunk = tl.load(pieces + piece)
        first = tl.load(pieces + num_pieces + piece)
        lane = tl.arange(0, BLOCK)
        offset = block * BLOCK + lane
        there = offset < numel
        WIDTH: tl.constexpr = 4 if NARROW else TYPE.primitive_bitwidth // 8
        READ: tl.constexpr = tl.uint32 if NARROW else TYPE
        source = _aligned(tl.load(new_at + chunk) + first * WIDTH, READ, ALIGNED)
        bits = tl.load(source + offset, mask=there, other=0)
        if NARROW:
            bits = _rounded(bits)
        at = tl.load(pieces + 3 * num_pieces + piece)
        values = payload.to(tl.pointer_type(TYPE)) + at
        if ALIGNED:
            values = tl.multiple_of(values, 16)
        tl.store(values + offset, bits, mask=there)
        if AHEAD:
            SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
            old = _aligned(tl.load(old_at + chunk) + first * SIZE, TYPE, ALIGNED)
            tl.store(old + offset, bits, mask=there)
            key = tl.load(keys + chunk).to(tl.uint64, bitcast=True)
            seed = _seed(key, tl.load(starts + chunk) + first + block * BLOCK)
            gained = _mix(seed + lane.to(tl.uint64) * _GOLDEN, bits)
            _add(digests, chunk, tl.where(there, gained, 0))


@triton.jit(do_not_specialize=["blocks_each"])
def digest(
    addresses, starts, numels, keys, chunks, digests, blocks_each,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Digests of chunks. ALIGNED: as in `pack_dense`."""
    item, block = tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    chunk = tl.load(chunks + item)
    numel = _length(numels + chunk, ALIGNED)
    if block * BLOCK < numel:
        lane = tl.arange(0, BLOCK)
        offset = block * BLOCK + lane
        there = offset < numel
        weights = _aligned(tl.load(addresses + chunk), TYPE, ALIGNED)
        bits = tl.load(weights + offset, mask=there, other=0)
        key = tl.load(keys + chunk).to(tl.uint64, bitcast=True)
        seed = _seed(key, tl.load(starts + chunk) + block * BLOCK)
        _add(digests, item, tl.where(there, _mix(seed + lane.to(tl.uint64) * _GOLDEN, bits), 0))


@triton.jit(do_not_specialize=["num_rows"])
def check(
    rows, segment_row, segment_begin, payload, flag, digests, sums, num_rows,
    TYPE: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Raise `flag` for rows with bad indices, and tell by how much good ones change the digests.

    rows: int64[9, num_rows]: where indices begin in the payload, in int32 units; where values
        begin, in elements; their number; span; flat position that indices count from; address
        of the parameter, 0 if it is not held; digest key; its first digest; its number.
    """
    segment = tl.program_id(0)
    row = rows + tl.load(segment_row + segment)
    lane = tl.load(segment_begin + segment) + tl.arange(0, SEGMENT)
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
        new = tl.load(values + lane, mask=good, other=0)
        old = _load(address, position, good, TYPE, False)
        key = tl.load(row + 6 * num_rows).to(tl.uint64, bitcast=True)
        seed = _seed(key, position)
        gained = tl.where(good, _mix(seed, new), 0)
        change = gained - tl.where(good, _mix(seed, old), 0)
        _add(sums, segment % _ACCUMULATORS, gained)
        _add_by_chunk(digests + tl.load(row + 7 * num_rows), position, good, change, CHUNK)


@triton.jit(do_not_specialize=["num_rows"])
def write(
    rows, segment_row, segment_begin, payload, flag, sums, num_rows,
    TYPE: tl.constexpr, KEEP: tl.constexpr, SEGMENT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write rows, as `check` takes them, unless `flag` is raised, and read them back.

    KEEP: What they replace takes their place in the payload.
    """
    segment, nth = tl.program_id(0) // (SEGMENT // PART), tl.program_id(0) % (SEGMENT // PART)
    row = rows + tl.load(segment_row + segment)
    first = tl.load(segment_begin + segment) + nth * PART
    count = tl.load(row + 2 * num_rows)
    address = tl.load(row + 5 * num_rows)
    if (address != 0) & (first < count) & (tl.load(flag) == _CLEAR):
        lane = first + tl.arange(0, PART)  # a thread with several would wait for each in turn
        there = lane < count
        indices = payload.to(tl.pointer_type(tl.int32)) + tl.load(row)
        position = tl.load(row + 4 * num_rows) + tl.load(indices + lane, mask=there, other=0)
        target = address.to(tl.pointer_type(TYPE)) + position
        values = payload.to(tl.pointer_type(TYPE)) + tl.load(row + num_rows) + lane
        key = tl.load(row + 6 * num_rows).to(tl.uint64, bitcast=True)
        seed = _seed(key, position)
        new = tl.load(values, mask=there, other=0)
        if KEEP:
            tl.store(values, tl.load(target, mask=there, other=0), mask=there)
        tl.store(target, new, mask=there)
        read = tl.load(target, mask=there, other=0, volatile=True)
        _add(sums, tl.program_id(0) % _ACCUMULATORS, tl.where(there, _mix(seed, read), 0))


@triton.jit
def _piece(pieces, payload, num_pieces, blocks_each, TYPE, ALIGNED: tl.constexpr, BLOCK):
    """(values, weights, seeds, mask) of the elements of a piece that this program looks at."""
    column, block = pieces + tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    lane = tl.arange(0, BLOCK)
    offset = block * BLOCK + lane
    start = tl.load(column + 2 * num_pieces)
    values = payload.to(tl.pointer_type(TYPE)) + tl.load(column)
    weights = tl.load(column + 3 * num_pieces).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        values, weights = tl.multiple_of(values, 16), tl.multiple_of(weights, 16)
    key = tl.load(column + 4 * num_pieces).to(tl.uint64, bitcast=True)
    seed = _seed(key, start + block * BLOCK)
    there = offset < _length(column + num_pieces, ALIGNED)
    return values + offset, weights + offset, seed + lane.to(tl.uint64) * _GOLDEN, there


@triton.jit(do_not_specialize=["num_pieces", "blocks_each"])
def check_dense(
    pieces, payload, digests, sums, num_pieces, blocks_each,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """By how much dense pieces will change the digests.

    pieces: int64[7, num_pieces]: where values begin in the payload, in elements; their
        number; flat position of the first; address of the parameter; digest key; which digest
        it belongs to; whether it makes up all of that.
    ALIGNED: Each piece begins at multiples of 16 bytes, and has a multiple of 16 elements.
    """
    piece, block = tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    if block * BLOCK < tl.load(pieces + num_pieces + piece):
        values, weights, seed, there = _piece(
            pieces, payload, num_pieces, blocks_each, TYPE, ALIGNED, BLOCK
        )
        gained = tl.where(there, _mix(seed, tl.load(values, mask=there, other=0)), 0)
        _add(sums, tl.program_id(0) % _ACCUMULATORS, gained)
        if tl.load(pieces + 6 * num_pieces + piece) == 0:
            gained -= tl.where(there, _mix(seed, tl.load(weights, mask=there, other=0)), 0)
        _add(digests, tl.load(pieces + 5 * num_pieces + piece), gained)


@triton.jit(do_not_specialize=["num_pieces", "blocks_each"])
def write_dense(
    pieces, payload, flag, digests, sums, num_pieces, blocks_each,
    TYPE: tl.constexpr, IN_PLACE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
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
        values, weights, seed, there = _piece(
            pieces, payload, num_pieces, blocks_each, TYPE, ALIGNED, BLOCK
        )
        new = tl.load(values, mask=there, other=0)
        is_part = tl.load(pieces + 6 * num_pieces + piece) == 0
        lost = tl.zeros((BLOCK,), tl.uint64)
        if IN_PLACE:
            if is_part:
                lost = tl.where(there, _mix(seed, tl.load(weights, mask=there, other=0)), 0)
        else:
            old = tl.load(weights, mask=there, other=0)
            tl.store(values, old, mask=there)
            if not is_part:
                _add(sums, _ACCUMULATORS + nth, tl.where(there, _mix(seed, old), 0))
        tl.store(weights, new, mask=there)
        read = tl.load(weights, mask=there, other=0, volatile=True)
        gained = tl.where(there, _mix(seed, read), 0)
        if IN_PLACE:
            _add(digests, tl.load(pieces + 5 * num_pieces + piece), gained - lost)
        else:
            _add(sums, nth, gained)
