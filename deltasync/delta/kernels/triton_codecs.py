"""Kernels in Triton for the codec `block`: what `codecs.blocks` does, for many rows at once.

Changes of all rows lie one after another. A *tile* is some changes, fields or blocks of one row: as
many as fit, or what is left. A program works on one. Tables are int64[columns, rows]:

- changes: where a row's changes begin, how many they are, its first tile;
- fields: the address of what is packed or unpacked, how many fields, their width, the address of
  the packed words, the first tile. Addresses are those of int32 elements;
- blocks: where a row's blocks begin, how many they are, bits of an offset, the address of its
  packed offsets, where its changes begin, its first tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.codecs.blocks import AS_IS, FIRST_NIBBLE, NIBBLE

TILE = 1024
"""Changes or fields that one program works on."""

LOCATED = 256
"""Blocks of which one program writes the indices."""

NO_SIGN, FLOAT_SIGN, INTEGER_SIGN = 0, 1, 2
"""How bits are put into the order of their values: as they are, a sign beside a magnitude, two's
complement."""

_FLOAT, _INTEGER = tl.constexpr(FLOAT_SIGN), tl.constexpr(INTEGER_SIGN)
_NIBBLE, _AS_IS, _FIRST = tl.constexpr(NIBBLE), tl.constexpr(AS_IS), tl.constexpr(FIRST_NIBBLE)


@triton.jit
def _ordered(bits, MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr):
    """Of uint64 bits: see `codecs.steps.ordered`."""
    if ORDER == _FLOAT:
        bits = tl.where((bits & SIGN) != 0, bits ^ MASK, bits ^ SIGN)
    elif ORDER == _INTEGER:
        bits = bits ^ SIGN
    return bits


@triton.jit
def _unordered(bits, MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr):
    """Of uint64 numbers: see `codecs.steps.unordered`."""
    if ORDER == _FLOAT:
        bits = tl.where((bits & SIGN) != 0, bits ^ SIGN, bits ^ MASK)
    elif ORDER == _INTEGER:
        bits = bits ^ SIGN
    return bits


@triton.jit
def _zigzag(new, old, MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr):
    """Of uint64 bits: see `codecs.steps.zigzag`."""
    step = _ordered(new, MASK, SIGN, ORDER) - _ordered(old, MASK, SIGN, ORDER)
    return tl.where((step & SIGN) != 0, (step << 1) ^ MASK, step << 1) & MASK


@triton.jit
def _stepped(zigzag, old, MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr):
    """Of uint64 numbers: see `codecs.steps.stepped`."""
    step = (zigzag >> 1) ^ (0 - (zigzag & 1))
    return _unordered((_ordered(old, MASK, SIGN, ORDER) + step) & MASK, MASK, SIGN, ORDER)


@triton.jit
def _field(words, number, width, there):
    """uint64: fields of one width, by number, of a stream of int32 words."""
    at = number * width
    low = tl.load(words + at // 32, mask=there, other=0).to(tl.uint32, bitcast=True)
    over = there & (at % 32 + width > 32)
    high = tl.load(words + at // 32 + 1, mask=over, other=0).to(tl.uint32, bitcast=True)
    both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    return (both >> (at % 32).to(tl.uint64)) & ((1 << width) - 1)


@triton.jit
def _lane_of(changes, tile_row, num_rows, TILE: tl.constexpr):
    """The row of a program, where each of its changes lies, and which are there."""
    tile = tl.program_id(0)
    row = tl.load(tile_row + tile)
    lane = (tile - tl.load(changes + 2 * num_rows + row)) * TILE + tl.arange(0, TILE)
    at = tl.load(changes + row) + lane
    return row, lane, at, lane < tl.load(changes + num_rows + row)


@triton.jit(do_not_specialize=["num_rows"])
def count_blocks(
    changes, tile_row, blocks, indices, counts, most, num_rows, TILE: tl.constexpr
):  # fmt: skip
    """Add up the changes of each block, int32, and the most of each row. All were 0."""
    row, _, at, there = _lane_of(changes, tile_row, num_rows, TILE)
    index = tl.load(indices + at, mask=there, other=0).to(tl.int64)
    block = tl.load(blocks + row) + (index >> tl.load(blocks + 2 * num_rows + row))
    before = tl.atomic_add(counts + block, 1, mask=there, sem="relaxed")
    tl.atomic_max(most + row, tl.max(tl.where(there, before + 1, 0)), sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def code_steps(
    changes, tile_row, new, old, codes, tile_counts, num_rows,
    MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The code of each change, int32, and how many nibbles and whole values each tile has.

    tile_counts: int64[tiles, 2].
    """
    _, _, at, there = _lane_of(changes, tile_row, num_rows, TILE)
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    after = tl.load(new + at, mask=there, other=0).to(tl.uint64) & MASK
    zigzag = _zigzag(after, before, MASK, SIGN, ORDER)
    is_short = (zigzag > 0) & (zigzag < _FIRST)
    is_nibble = (zigzag >= _FIRST) & (zigzag < _FIRST + 16)
    longer = tl.where(is_nibble, _NIBBLE, _AS_IS)
    tl.store(codes + at, tl.where(is_short, zigzag.to(tl.int32) - 1, longer), mask=there)
    counts = tile_counts + 2 * tl.program_id(0)
    tl.store(counts, tl.sum((there & is_nibble).to(tl.int64)))
    tl.store(counts + 1, tl.sum((there & ~(is_short | is_nibble)).to(tl.int64)))


@triton.jit(do_not_specialize=["num_rows"])
def split_steps(
    changes, tile_row, new, old, codes, tile_begins, targets, num_rows,
    MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write nibbles, int32, and whole values, those of a row one after another.

    tile_begins: int64[tiles, 2], where those of a tile begin in its row.
    targets: int64[2, rows], the addresses of each row's first nibble and whole value.
    """
    row, _, at, there = _lane_of(changes, tile_row, num_rows, TILE)
    code = tl.load(codes + at, mask=there, other=0)
    bits = tl.load(new + at, mask=there, other=0).to(tl.uint64) & MASK
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    zigzag = _zigzag(bits, before, MASK, SIGN, ORDER)
    begins = tile_begins + 2 * tl.program_id(0)
    is_nibble, is_whole = code == _NIBBLE, code == _AS_IS
    first = tl.load(begins) + tl.cumsum(is_nibble.to(tl.int32), axis=0) - 1
    nibbles = tl.load(targets + row).to(tl.pointer_type(tl.int32))
    tl.store(nibbles + first, (zigzag - _FIRST).to(tl.int32), mask=is_nibble)
    second = tl.load(begins + 1) + tl.cumsum(is_whole.to(tl.int32), axis=0) - 1
    target = tl.load(targets + num_rows + row)
    if TYPE.primitive_bitwidth == 64:  # they begin at a multiple of 4 bytes
        halves = target.to(tl.pointer_type(tl.uint32)) + 2 * second
        tl.store(halves, (bits & 0xFFFFFFFF).to(tl.uint32), mask=is_whole)
        tl.store(halves + 1, (bits >> 32).to(tl.uint32), mask=is_whole)
    else:
        wholes = target.to(tl.pointer_type(TYPE)) + second
        tl.store(wholes, bits.to(TYPE), mask=is_whole)


@triton.jit(do_not_specialize=["num_rows"])
def pack_fields(fields, tile_row, num_rows, TILE: tl.constexpr):
    """Write the low bits of int32 numbers as fields, 32 of them into as many words as one has bits.

    A word that no field fills is padded with zeros.
    """
    tile = tl.program_id(0)
    row = fields + tl.load(tile_row + tile)
    source = tl.load(row).to(tl.pointer_type(tl.int32))
    count, width = tl.load(row + num_rows), tl.load(row + 2 * num_rows)
    words = tl.load(row + 3 * num_rows).to(tl.pointer_type(tl.int32))
    first = (tile - tl.load(row + 4 * num_rows)) * (TILE // 32)
    group = first + tl.arange(0, TILE // 32)
    column = tl.arange(0, 32)[None, :]
    at = group[:, None] * 32 + column
    number = tl.load(source + at, mask=at < count, other=0).to(tl.uint64)
    number = number & ((1 << width) - 1)
    stop = (count * width + 31) // 32
    word = tl.zeros_like(width)
    while word < width:
        shift = column * width - 32 * word
        up = number << tl.minimum(tl.maximum(shift, 0), 63).to(tl.uint64)
        down = number >> tl.minimum(tl.maximum(0 - shift, 0), 63).to(tl.uint64)
        here = tl.where(shift < 0, down, tl.where(shift < 32, up, 0)) & 0xFFFFFFFF
        found = tl.sum(here, axis=1).to(tl.uint32).to(tl.int32, bitcast=True)
        place = group * width + word
        tl.store(words + place, found, mask=place < stop)
        word += 1


@triton.jit(do_not_specialize=["num_rows"])
def unpack_fields(fields, tile_row, num_rows, TILE: tl.constexpr):
    """Write fields as int32 numbers: the inverse of `pack_fields`."""
    tile = tl.program_id(0)
    row = fields + tl.load(tile_row + tile)
    target = tl.load(row).to(tl.pointer_type(tl.int32))
    count, width = tl.load(row + num_rows), tl.load(row + 2 * num_rows)
    words = tl.load(row + 3 * num_rows).to(tl.pointer_type(tl.int32))
    at = (tile - tl.load(row + 4 * num_rows)) * TILE + tl.arange(0, TILE)
    number = _field(words, at, width, at < count)
    tl.store(target + at, number.to(tl.int32), mask=at < count)


@triton.jit(do_not_specialize=["num_rows"])
def locate_blocks(blocks, tile_row, ends, indices, num_rows, TILE: tl.constexpr):
    """Write the int32 indices of the changes that blocks have.

    ends: int64[blocks + 1]: 0, then where the changes of each block end, over all rows. They must
        have been checked: those of a row are as many as it has.
    """
    tile = tl.program_id(0)
    row = blocks + tl.load(tile_row + tile)
    lane = (tile - tl.load(row + 5 * num_rows)) * TILE + tl.arange(0, TILE)
    there = lane < tl.load(row + num_rows)
    width = tl.load(row + 2 * num_rows)
    words = tl.load(row + 3 * num_rows).to(tl.pointer_type(tl.int32))
    origin = tl.load(row + 4 * num_rows)
    block = tl.load(row) + lane
    at = tl.load(ends + block, mask=there, other=0)
    left = tl.load(ends + block + 1, mask=there, other=0) - at
    rounds = tl.max(left)
    while rounds > 0:
        some = left > 0
        offset = _field(words, at - origin, width, some).to(tl.int64)
        tl.store(indices + at, ((lane << width) + offset).to(tl.int32), mask=some)
        at += 1
        left -= 1
        rounds -= 1


@triton.jit(do_not_specialize=["num_rows"])
def count_codes(changes, tile_row, codes_at, tile_counts, num_rows, TILE: tl.constexpr):
    """How many nibbles and whole values each tile has: int64[tiles, 2].

    codes_at: int64[rows], the address of each row's packed codes.
    """
    row, lane, _, there = _lane_of(changes, tile_row, num_rows, TILE)
    words = tl.load(codes_at + row).to(tl.pointer_type(tl.int32))
    code = tl.where(there, _field(words, lane, 2, there), 0)
    counts = tile_counts + 2 * tl.program_id(0)
    tl.store(counts, tl.sum((code == _NIBBLE).to(tl.int64)))
    tl.store(counts + 1, tl.sum((code == _AS_IS).to(tl.int64)))


@triton.jit(do_not_specialize=["num_rows"])
def decode_steps(
    changes, tile_row, values, tile_begins, old, new, num_rows,
    MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the new bits of changes.

    values: int64[3, rows], the addresses of each row's packed codes, nibbles and whole values.
    tile_begins: int64[tiles, 2], where those of a tile begin in its row.
    old: Bits before, of the elements' type. `new` may be the same memory.
    """
    row, lane, at, there = _lane_of(changes, tile_row, num_rows, TILE)
    words = tl.load(values + row).to(tl.pointer_type(tl.int32))
    code = _field(words, lane, 2, there)
    is_nibble, is_whole = there & (code == _NIBBLE), there & (code == _AS_IS)
    begins = tile_begins + 2 * tl.program_id(0)
    first = tl.load(begins) + tl.cumsum(is_nibble.to(tl.int32), axis=0) - 1
    words = tl.load(values + num_rows + row).to(tl.pointer_type(tl.int32))
    nibble = _field(words, first, 4, is_nibble)
    second = tl.load(begins + 1) + tl.cumsum(is_whole.to(tl.int32), axis=0) - 1
    if TYPE.primitive_bitwidth == 64:  # they begin at a multiple of 4 bytes
        halves = tl.load(values + 2 * num_rows + row).to(tl.pointer_type(tl.uint32))
        low = tl.load(halves + 2 * second, mask=is_whole, other=0).to(tl.uint64)
        high = tl.load(halves + 2 * second + 1, mask=is_whole, other=0).to(tl.uint64)
        whole = low | (high << 32)
    else:
        wholes = tl.load(values + 2 * num_rows + row).to(tl.pointer_type(TYPE))
        whole = tl.load(wholes + second, mask=is_whole, other=0).to(tl.uint64)
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    zigzag = tl.where(is_nibble, nibble + _FIRST, code + 1)
    after = tl.where(is_whole, whole, _stepped(zigzag, before, MASK, SIGN, ORDER))
    tl.store(new + at, after.to(TYPE), mask=there)
