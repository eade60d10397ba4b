"""Kernels in Triton: each goes over all parameters in one launch, through tables of addresses.

These compare and pack; those of `triton_live` check and write.

A *chunk* is described by columns that the launcher gets as tensors: the address of its first
element, its number in the region that is held of the parameter, its length, the digest seed of its
parameter, and the rows of the region (`delta.region`): indices that are sent, and digests, count
what lies between rows too. Addresses are those of device memory, of pinned host
memory, or under Triton's interpreter of any host memory.

The caller makes the device current; work goes to the current stream, nothing waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels import reads
from deltasync.delta.kernels.triton_base import (
    GOLDEN,
    add_up,
    aligned,
    left_out,
    length_of,
    load,
    mix,
    popcount,
    rounded,
    seed_of,
)

BLOCK = 4096
"""Elements that one program looks at: 32 to a word of the mask."""

COUNTED = 8
"""Blocks whose masks one program of `count_masks` reads."""

GROUP = 4
"""Blocks whose masks one program of `locate` reads."""

TILE = 64
"""Blocks whose changes one program of `collect` reads."""

_AS_IS, _ROUNDED, _COMPUTED = (
    tl.constexpr(reads.AS_IS),
    tl.constexpr(reads.ROUNDED),
    tl.constexpr(reads.COMPUTED),
)


@triton.jit
def read(
    address, offsets, mask, start, quantized,
    TYPE: tl.constexpr, READ: tl.constexpr, CODES_AT: tl.constexpr,
):  # fmt: skip
    """Bits that are sent of elements of a chunk, whatever the source keeps.

    Args:
        address: Of the chunk's first element in the source.
        offsets: From there on.
        mask: Which to read.
        start: Where the chunk begins in its parameter.
        quantized: Where it says how, if they are computed.
        TYPE: Of the bits.
        READ: See `reads`.
        CODES_AT: What computes them: see `Computed.codes_at`.
    """
    if READ < _COMPUTED:
        bits = load(address, offsets, mask, TYPE, READ == _ROUNDED)
    else:
        bits = CODES_AT(address, offsets, mask, start, quantized, TYPE, READ)
    return bits


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
        if offset <= numel - BLOCK:
            found = _pairs(new, old, offset, numel, True, BLOCK)
        else:
            found = _pairs(new, old, offset, numel, False, BLOCK)
    else:
        column = tl.arange(0, 32)[None, :]
        where = offset + tl.arange(0, BLOCK // 32)[:, None] * 32 + column
        there = where < numel
        differ = load(new, where, there, TYPE, NARROW) != load(old, where, there, TYPE, False)
        found = tl.sum(differ.to(tl.uint32) << column, axis=1)
    at = block.to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(words + at, found.to(tl.int32, bitcast=True))
    count = tl.sum(popcount(found))
    tl.store(counts + block, count)
    if count > 0:
        tl.atomic_add(chunk_counts + chunk, count, sem="relaxed")


@triton.jit(do_not_specialize=["begin", "end"])
def count_masks(
    numels, first_block, chunk_of, words, counts, chunk_counts, begin, end,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Counts of masks that are there, for each block from `begin` to `end`, added up by chunk.

    Words beyond the end of a chunk are set to 0. A program has GROUP blocks.
    """
    block = begin + tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    live = block < end
    chunk = tl.load(chunk_of + block, mask=live, other=0)
    offset = (block - tl.load(first_block + chunk)) * BLOCK
    left = tl.where(live, tl.load(numels + chunk) - offset, 0)
    word = tl.arange(0, BLOCK // 32)[None, :]
    at = words + (block.to(tl.int64)[:, None] * (BLOCK // 32) + word)
    there = word * 32 < left[:, None]
    found = tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True)
    tl.store(at, 0, mask=live[:, None] & ~there)
    number = tl.sum(popcount(found), axis=1)
    tl.store(counts + block, number, mask=live)
    tl.atomic_add(chunk_counts + chunk, number, mask=number > 0, sem="relaxed")


@triton.jit(do_not_specialize=["capacity", "begin", "end", "out"])
def locate(
    first_block, chunk_of, shifts, words, ends, indices, capacity, begin, end, out,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Indices of the elements that the masks of blocks [begin, end) mark, one after another.

    They are relative to the origin of their chunk: an element of a chunk has the chunk's entry in
    `shifts` plus its place in the chunk. The first one of block `begin` goes to `out`. Blocks that
    `ends` leaves no room for are left out. Does nothing if all of [begin, end) do not fit into
    `capacity`.
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
        found = popcount(left)
        place = (rank - origin)[:, None] + tl.cumsum(found, axis=1) - found
        row = offset[:, None] + column * 32
        rounds = tl.max(found)
        while rounds > 0:
            there = left != 0
            where = row + popcount((left & (0 - left)) - 1)
            tl.store(indices + place, where, mask=there)
            place += there.to(tl.int64)
            left = left & (left - 1)
            rounds -= 1


@triton.jit(do_not_specialize=["capacity", "begin_tile", "begin", "end", "out"])
def collect(
    new_at, old_at, starts, keys, cols, gaps, shifts, quantized, tile_chunk, tile_block, ends,
    indices, values, changes, capacity, begin_tile, begin, end, out,
    TYPE: tl.constexpr, READ: tl.constexpr, CODES_AT: tl.constexpr, AHEAD: tl.constexpr,
    GAPS: tl.constexpr, STRIDE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """New values of the elements that `locate` found, and by how much they change the digests.

    A program goes over a tile: blocks [tile_block[i], tile_block[i + 1]) of one chunk. Values go
    where indices are, STRIDE elements apart; with AHEAD to the snapshot too. GAPS: Rows may have
    some. READ, CODES_AT: See `read`.
    """
    tile = begin_tile + tl.program_id(0)
    first, stop = tl.load(tile_block + tile), tl.load(tile_block + tile + 1)
    chunk = tl.load(tile_chunk + tile)
    origin = tl.load(ends + begin) - out
    rank = tl.load(ends + first)
    count = tl.load(ends + stop) - rank
    if (count > 0) & (tl.load(ends + end) - origin <= capacity):
        new_from, old_from = tl.load(new_at + chunk), tl.load(old_at + chunk)
        shift, start = tl.load(shifts + chunk), tl.load(starts + chunk)
        seed = seed_of(tl.load(keys + chunk).to(tl.uint64, bitcast=True), start)
        change = tl.zeros((SEGMENT,), tl.uint64)
        done = 0
        while done < count:
            lane = done + tl.arange(0, SEGMENT)
            there = lane < count
            at = rank - origin + lane
            where = tl.load(indices + at, mask=there, other=shift) - shift
            new = read(new_from, where, there, start, quantized + 3 * chunk, TYPE, READ, CODES_AT)
            old = load(old_from, where, there, TYPE, False)
            tl.store(values.to(tl.pointer_type(TYPE)) + at * STRIDE, new, mask=there)
            if AHEAD:
                tl.store(old_from.to(tl.pointer_type(TYPE)) + where, new, mask=there)
            one = seed_of(seed, where)
            if GAPS:
                one = seed_of(one, left_out(start + where, cols + chunk, gaps + chunk))
            change += tl.where(there, mix(one, new) - mix(one, old), 0)
            done += SEGMENT
        add_up(changes, chunk, change)


@triton.jit(do_not_specialize=["payload_bytes", "num_rows"])
def pack(
    rows, segment_row, indices, values, payload, payload_bytes, num_rows,
    TYPE: tl.constexpr, GAPS: tl.constexpr, STRIDE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write sparse rows to a payload.

    rows: int64[11, num_rows]: where a row begins in `indices`; where its indices begin in the
        payload, in int32 units; where its values begin, in elements; their number; the position
        that those in the payload count from; that those in `indices` count from; address of the
        snapshot's parameter; its cols and gap, looked at with GAPS; its first segment; how many.
    segment_row: int64[segments]: of a row each, SEGMENT elements or what is left of it.
    """
    segment = tl.program_id(0)
    row = rows + tl.load(segment_row + segment)
    lane = (segment - tl.load(row + 9 * num_rows)) * SEGMENT + tl.arange(0, SEGMENT)
    begin, count = tl.load(row), tl.load(row + 3 * num_rows)
    there = lane < count
    index = tl.load(indices + begin + lane, mask=there, other=0) + tl.load(row + 5 * num_rows)
    if GAPS:
        index += left_out(index, row + 7 * num_rows, row + 8 * num_rows)
    index -= tl.load(row + 4 * num_rows)
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
    rows, segment_row, indices, values, num_rows,
    TYPE: tl.constexpr, STRIDE: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write the values of rows, as `pack` takes them, to the snapshot."""
    segment = tl.program_id(0)
    row = rows + tl.load(segment_row + segment)
    lane = (segment - tl.load(row + 9 * num_rows)) * SEGMENT + tl.arange(0, SEGMENT)
    there = lane < tl.load(row + 3 * num_rows)
    at = tl.load(row) + lane
    position = tl.load(row + 5 * num_rows) + tl.load(indices + at, mask=there, other=0)
    value = tl.load(values.to(tl.pointer_type(TYPE)) + at * STRIDE, mask=there, other=0)
    old = tl.load(row + 6 * num_rows).to(tl.pointer_type(TYPE))
    tl.store(old + position, value, mask=there)


@triton.jit(do_not_specialize=["num_pieces", "blocks_each"])
def pack_dense(
    new_at, old_at, starts, keys, cols, gaps, quantized, pieces, payload, digests, num_pieces,
    blocks_each, TYPE: tl.constexpr, READ: tl.constexpr, CODES_AT: tl.constexpr,
    AHEAD: tl.constexpr, GAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy pieces of chunks to a payload; with AHEAD to the snapshot, adding up their digests.

    pieces: int64[6, num_pieces]: chunk, first element in it, elements; where the first goes in the
        payload, in elements; with GAPS where its index does, in int32 units, 0 for no indices, and
        the position that they count from.
    ALIGNED: Each piece begins at multiples of 16 bytes, and has a multiple of 16 elements.
    """
    piece, block = tl.program_id(0) // blocks_each, tl.program_id(0) % blocks_each
    numel = length_of(pieces + 2 * num_pieces + piece, ALIGNED)
    if block * BLOCK < numel:
        chunk = tl.load(pieces + piece)
        first = tl.load(pieces + num_pieces + piece)
        lane = tl.arange(0, BLOCK)
        offset = block * BLOCK + lane
        there = offset < numel
        new_from = tl.load(new_at + chunk)
        start = tl.load(starts + chunk)
        SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
        if READ == _AS_IS:
            source = aligned(new_from + first * SIZE, TYPE, ALIGNED)
            bits = tl.load(source + offset, mask=there, other=0)
        elif READ == _ROUNDED:
            source = aligned(new_from + first * 4, tl.uint32, ALIGNED)
            bits = rounded(tl.load(source + offset, mask=there, other=0))
        else:
            where = first + offset
            bits = read(new_from, where, there, start, quantized + 3 * chunk, TYPE, READ, CODES_AT)
        at = tl.load(pieces + 3 * num_pieces + piece)
        values = payload.to(tl.pointer_type(TYPE)) + at
        if ALIGNED:
            values = tl.multiple_of(values, 16)
        tl.store(values + offset, bits, mask=there)
        start += first + block * BLOCK
        key = tl.load(keys + chunk).to(tl.uint64, bitcast=True)
        seed = seed_of(key, start) + lane.to(tl.uint64) * GOLDEN
        if GAPS:
            skipped = left_out(start + lane, cols + chunk, gaps + chunk)
            seed = seed_of(seed, skipped)
            index_at = tl.load(pieces + 4 * num_pieces + piece)
            if index_at != 0:
                indices = payload.to(tl.pointer_type(tl.int32)) + index_at
                if ALIGNED:
                    indices = tl.multiple_of(indices, 16)
                index = start + lane + skipped - tl.load(pieces + 5 * num_pieces + piece)
                tl.store(indices + offset, index.to(tl.int32), mask=there)
        if AHEAD:
            old = aligned(tl.load(old_at + chunk) + first * SIZE, TYPE, ALIGNED)
            tl.store(old + offset, bits, mask=there)
            add_up(digests, chunk, tl.where(there, mix(seed, bits), 0))
