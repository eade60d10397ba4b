"""Kernels in Triton for the codec `block`: what `codecs.blocks` does, for many rows at once.

Changes of all rows lie one after another. A *tile* is some changes, fields or blocks of one row: as
many as fit, or what is left. A program works on one. What it has to know of its row is in `rows`,
int64[columns, num_rows], of which the first column is the row's first tile. `tile_row`,
int64[tiles], says which row that is. Numbers that are added up over tiles go to `ends`,
int64[1 + tiles, n]: each tile writes its own one line further down, and whoever reads them, added
up, finds in each line what the tiles before have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.codecs.blocks import AS_IS, FIRST_NIBBLE, NIBBLE

TILE = 1024
"""Changes or fields that one program works on."""

LOCATED = 256
"""Blocks of which one program writes the indices."""

COPIED = 2048
"""Elements that one program copies."""

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
def zigzag_of(new, old, MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr):
    """Of uint64 bits: see `codecs.steps.zigzag`."""
    step = _ordered(new, MASK, SIGN, ORDER) - _ordered(old, MASK, SIGN, ORDER)
    return tl.where((step & SIGN) != 0, (step << 1) ^ MASK, step << 1) & MASK


@triton.jit
def stepped_by(zigzag, old, MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr):
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
def _row_of(rows, tile_row, TILE: tl.constexpr):
    """The column of a program's row, and what of the row it works on."""
    tile = tl.program_id(0)
    row = rows + tl.load(tile_row + tile)
    return row, (tile - tl.load(row)) * TILE + tl.arange(0, TILE)


@triton.jit
def _sums(ends, row, count, nth, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """(before, total): the nth number of `ends` over a row, before a program's tile and in all."""
    first = tl.load(row)
    begin = tl.load(ends + WIDTH * first + nth)
    before = tl.load(ends + WIDTH * tl.program_id(0) + nth) - begin
    stop = first + (count + TILE - 1) // TILE
    return before, tl.load(ends + WIDTH * stop + nth) - begin


@triton.jit(do_not_specialize=["num_rows"])
def count_blocks(rows, tile_row, indices, counts, most, num_rows, TILE: tl.constexpr):
    """Add up the changes of each block, int32, and the most of each row, int64. All were 0.

    rows: first tile; where changes begin; their number; where the row's blocks begin; bits of an
        offset.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    there = lane < tl.load(row + 2 * num_rows)
    index = tl.load(indices + tl.load(row + num_rows) + lane, mask=there, other=0).to(tl.int64)
    block = tl.load(row + 3 * num_rows) + (index >> tl.load(row + 4 * num_rows))
    before = tl.atomic_add(counts + block, 1, mask=there, sem="relaxed")
    found = tl.max(tl.where(there, before + 1, 0)).to(tl.int64)
    tl.atomic_max(most + tl.load(tile_row + tl.program_id(0)), found, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def code_steps(
    rows, tile_row, new, old, codes, ends, num_rows,
    MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The code of each change, int32, and how many nibbles and whole values each tile has.

    rows: As of `count_blocks`.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    there = lane < tl.load(row + 2 * num_rows)
    at = tl.load(row + num_rows) + lane
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    after = tl.load(new + at, mask=there, other=0).to(tl.uint64) & MASK
    zigzag = zigzag_of(after, before, MASK, SIGN, ORDER)
    is_short = (zigzag > 0) & (zigzag < _FIRST)
    is_nibble = (zigzag >= _FIRST) & (zigzag < _FIRST + 16)
    longer = tl.where(is_nibble, _NIBBLE, _AS_IS)
    tl.store(codes + at, tl.where(is_short, zigzag.to(tl.int32) - 1, longer), mask=there)
    own = ends + 2 * (tl.program_id(0) + 1)
    tl.store(own, tl.sum((there & is_nibble).to(tl.int64)))
    tl.store(own + 1, tl.sum((there & ~(is_short | is_nibble)).to(tl.int64)))


@triton.jit(do_not_specialize=["num_rows"])
def split_steps(
    rows, tile_row, new, old, codes, ends, targets, num_rows,
    MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write nibbles, int32, and whole values, those of a row one after another.

    rows, ends: As `code_steps` takes and makes them, added up.
    targets: int64[2, num_rows], the addresses of each row's first nibble and whole value.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    count = tl.load(row + 2 * num_rows)
    there = lane < count
    at = tl.load(row + num_rows) + lane
    code = tl.load(codes + at, mask=there, other=0)
    bits = tl.load(new + at, mask=there, other=0).to(tl.uint64) & MASK
    before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
    zigzag = zigzag_of(bits, before, MASK, SIGN, ORDER)
    is_nibble, is_whole = code == _NIBBLE, code == _AS_IS
    ahead, _ = _sums(ends, row, count, 0, 2, TILE)
    first = ahead + tl.cumsum(is_nibble.to(tl.int32), axis=0) - 1
    target = targets + tl.load(tile_row + tl.program_id(0))
    nibbles = tl.load(target).to(tl.pointer_type(tl.int32))
    tl.store(nibbles + first, (zigzag - _FIRST).to(tl.int32), mask=is_nibble)
    ahead, _ = _sums(ends, row, count, 1, 2, TILE)
    second = ahead + tl.cumsum(is_whole.to(tl.int32), axis=0) - 1
    wholes_at = tl.load(target + num_rows)
    if TYPE.primitive_bitwidth == 64:  # they begin at a multiple of 4 bytes
        halves = wholes_at.to(tl.pointer_type(tl.uint32)) + 2 * second
        tl.store(halves, (bits & 0xFFFFFFFF).to(tl.uint32), mask=is_whole)
        tl.store(halves + 1, (bits >> 32).to(tl.uint32), mask=is_whole)
    else:
        wholes = wholes_at.to(tl.pointer_type(TYPE)) + second
        tl.store(wholes, bits.to(TYPE), mask=is_whole)


@triton.jit(do_not_specialize=["num_rows"])
def pack_fields(rows, tile_row, num_rows, TILE: tl.constexpr):
    """Write the low bits of int32 numbers as fields, 32 of them into as many words as one has bits.

    A word that no field fills is padded with zeros.

    rows: first tile; address of the numbers; how many; the width of a field; address of the words,
        int32. They are jobs, of which a row of a payload has several.
    """
    tile = tl.program_id(0)
    row = rows + tl.load(tile_row + tile)
    source = tl.load(row + num_rows).to(tl.pointer_type(tl.int32))
    count, width = tl.load(row + 2 * num_rows), tl.load(row + 3 * num_rows)
    words = tl.load(row + 4 * num_rows).to(tl.pointer_type(tl.int32))
    first = (tile - tl.load(row)) * (TILE // 32)
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
def count_located(rows, tile_row, ends, num_rows, TILE: tl.constexpr):
    """How many changes the blocks of each tile count.

    rows: first tile; address of packed counts; how many blocks; the width of a count; address of
        packed offsets; the width of one; where changes begin; their number.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    words = tl.load(row + num_rows).to(tl.pointer_type(tl.int32))
    there = lane < tl.load(row + 2 * num_rows)
    own = _field(words, lane, tl.load(row + 3 * num_rows), there).to(tl.int64)
    tl.store(ends + tl.program_id(0) + 1, tl.sum(tl.where(there, own, 0)))


@triton.jit(do_not_specialize=["num_rows"])
def locate_blocks(rows, tile_row, ends, indices, num_rows, TILE: tl.constexpr):
    """Write the int32 indices of the changes that blocks count; none of a row that counts others.

    rows, ends: As `count_located` takes and makes them, added up.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    blocks = tl.load(row + 2 * num_rows)
    ahead, total = _sums(ends, row, blocks, 0, 1, TILE)
    if total == tl.load(row + 7 * num_rows):
        words = tl.load(row + num_rows).to(tl.pointer_type(tl.int32))
        there = lane < blocks
        left = _field(words, lane, tl.load(row + 3 * num_rows), there).to(tl.int32)
        left = tl.where(there, left, 0)
        rank = ahead + tl.cumsum(left, axis=0) - left
        words = tl.load(row + 4 * num_rows).to(tl.pointer_type(tl.int32))
        width = tl.load(row + 5 * num_rows)
        target = indices + tl.load(row + 6 * num_rows)
        rounds = tl.max(left)
        while rounds > 0:
            some = left > 0
            offset = _field(words, rank, width, some).to(tl.int64)
            tl.store(target + rank, ((lane << width) + offset).to(tl.int32), mask=some)
            rank += 1
            left -= 1
            rounds -= 1


@triton.jit(do_not_specialize=["num_rows"])
def count_codes(rows, tile_row, ends, num_rows, TILE: tl.constexpr):
    """How many nibbles and whole values each tile has.

    rows: first tile; where changes begin; their number; address of a row's value block, which
        begins with its codes; where nibbles begin in it, in bytes; its length, in bytes.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    there = lane < tl.load(row + 2 * num_rows)
    words = tl.load(row + 3 * num_rows).to(tl.pointer_type(tl.int32))
    code = tl.where(there, _field(words, lane, 2, there), 0)
    own = ends + 2 * (tl.program_id(0) + 1)
    tl.store(own, tl.sum((code == _NIBBLE).to(tl.int64)))
    tl.store(own + 1, tl.sum((code == _AS_IS).to(tl.int64)))


@triton.jit(do_not_specialize=["num_rows"])
def decode_steps(
    rows, tile_row, ends, old, new, num_rows,
    MASK: tl.constexpr, SIGN: tl.constexpr, ORDER: tl.constexpr, TYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the new bits of changes; none of a row whose block has another length than its codes.

    rows, ends: As `count_codes` takes and makes them, added up.
    old: Bits before, of the elements' type. `new` may be the same memory.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    count = tl.load(row + 2 * num_rows)
    block, nibbles_at = tl.load(row + 3 * num_rows), tl.load(row + 4 * num_rows)
    ahead, nibbles = _sums(ends, row, count, 0, 2, TILE)
    ahead_whole, wholes = _sums(ends, row, count, 1, 2, TILE)
    wholes_at = nibbles_at + (nibbles * 4 + 31) // 32 * 4
    length = wholes_at + (wholes * TYPE.primitive_bitwidth + 31) // 32 * 4
    if length == tl.load(row + 5 * num_rows):
        there = lane < count
        at = tl.load(row + num_rows) + lane
        code = _field(block.to(tl.pointer_type(tl.int32)), lane, 2, there)
        is_nibble, is_whole = there & (code == _NIBBLE), there & (code == _AS_IS)
        first = ahead + tl.cumsum(is_nibble.to(tl.int32), axis=0) - 1
        words = (block + nibbles_at).to(tl.pointer_type(tl.int32))
        nibble = _field(words, first, 4, is_nibble)
        second = ahead_whole + tl.cumsum(is_whole.to(tl.int32), axis=0) - 1
        if TYPE.primitive_bitwidth == 64:  # they begin at a multiple of 4 bytes
            halves = (block + wholes_at).to(tl.pointer_type(tl.uint32))
            low = tl.load(halves + 2 * second, mask=is_whole, other=0).to(tl.uint64)
            high = tl.load(halves + 2 * second + 1, mask=is_whole, other=0).to(tl.uint64)
            whole = low | (high << 32)
        else:
            values = (block + wholes_at).to(tl.pointer_type(TYPE))
            whole = tl.load(values + second, mask=is_whole, other=0).to(tl.uint64)
        before = tl.load(old + at, mask=there, other=0).to(tl.uint64) & MASK
        zigzag = tl.where(is_nibble, nibble + _FIRST, code + 1)
        after = tl.where(is_whole, whole, stepped_by(zigzag, before, MASK, SIGN, ORDER))
        tl.store(new + at, after.to(TYPE), mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def copy_pieces(rows, tile_row, num_rows, TYPE: tl.constexpr, TILE: tl.constexpr):
    """Copy runs of elements, wherever they are.

    rows: first tile; address to read; address to write; how many elements of TYPE.
    """
    row, lane = _row_of(rows, tile_row, TILE)
    there = lane < tl.load(row + 3 * num_rows)
    source = tl.load(row + num_rows).to(tl.pointer_type(TYPE))
    target = tl.load(row + 2 * num_rows).to(tl.pointer_type(TYPE))
    tl.store(target + lane, tl.load(source + lane, mask=there, other=0), mask=there)
