"""Kernels of served forms: they quantize what they read of the trainer's weights.

Divisions are those of IEEE 754, as torch's are; Triton's own are not exact on GPUs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels.triton_base import load, popcount

_BLOCK = tl.constexpr(128)
_LARGEST = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-4)


@triton.jit
def _weights(address, offsets, mask, WIDE: tl.constexpr):
    """uint32: bfloat16 bits of elements; WIDE reads float32."""
    return load(address, offsets, mask, tl.uint16, WIDE).to(tl.uint32)


@triton.jit
def _as_float(bits):
    """float32 of bfloat16 bits."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(x, NATIVE: tl.constexpr):
    """uint8: float8_e4m3fn bits of float32, to the nearest even; NaN of what is out of range.

    NATIVE leaves it to the GPU, which gives the largest number instead of such a NaN. In blocks
    that are finite nothing is out of range. Otherwise as c10/util/Float8_e4m3fn.h of torch does.
    """
    if NATIVE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        bits = bits & 0x7FFFFFFF
        # An addition rounds what is too small for a normal number.
        small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True)
        normal = (bits + 0xC407FFFF + ((bits >> 20) & 1)) >> 20
        code = tl.where(bits < 0x3C800000, small - 0x46800000, normal)
        code = (tl.where(bits >= 0x43F00000, 0x7F, code) | sign).to(tl.uint8)
    return code


@triton.jit
def block_fp8(
    address, offsets, mask, start, scales, width, WIDE: tl.constexpr, NATIVE: tl.constexpr
):
    """uint8 codes of elements, by the scales of their blocks of 128 x 128, which are known.

    Args:
        address: Of the first element of a chunk.
        offsets: Of elements from there on.
        mask: Which to read.
        start: Where the chunk begins in its matrix.
        scales: Address of float32 scales, block row after block row.
        width: Columns of the matrix.
    """
    position = start + offsets
    row, col = position // width, position % width
    wide = (width + _BLOCK - 1) // _BLOCK
    at = row // _BLOCK * wide + col // _BLOCK
    scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=1.0)
    bits = _weights(address, offsets, mask, WIDE)
    return e4m3(_as_float(bits) * tl.div_rn(1.0, scale), NATIVE)


@triton.jit
def _scale_of(largest, UE8M0: tl.constexpr):
    """float32 scale of a block of which this is the largest magnitude; itself if not finite."""
    scale = tl.div_rn(tl.maximum(largest, _LEAST), _LARGEST)
    if UE8M0:  # the least power of two that is not below
        bits = scale.to(tl.uint32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
        exponent = tl.minimum(tl.maximum(exponent, 1), 254)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(largest < float("inf"), scale, largest)


@triton.jit(do_not_specialize=["num_matrices"])
def compare_block_fp8(
    table, matrix_of, words, num_matrices,
    WIDE: tl.constexpr, UE8M0: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The scale of a block of 128 x 128 elements, and the mask of codes that differ.

    table: int64[7, num_matrices]: address of the weight, of the codes that it is compared with, of
        the scales; rows; columns, a multiple of 32; the first word of its masks; its first block.
    matrix_of: int32[blocks], whose each is.
    """
    block = tl.program_id(0)
    at = table + tl.load(matrix_of + block)
    weight, old = tl.load(at), tl.load(at + num_matrices)
    scales = tl.load(at + 2 * num_matrices).to(tl.pointer_type(tl.float32))
    rows, cols = tl.load(at + 3 * num_matrices), tl.load(at + 4 * num_matrices)
    first_word = tl.load(at + 5 * num_matrices)
    here = block - tl.load(at + 6 * num_matrices)
    wide = (cols + _BLOCK - 1) // _BLOCK
    row = here // wide * _BLOCK + tl.arange(0, 128)[:, None, None]
    begin = here % wide * _BLOCK + tl.arange(0, 4)[None, :, None] * 32
    lane = tl.arange(0, 32)[None, None, :]
    there = (row < rows) & (begin < cols)
    offsets = row * cols + begin + lane
    bits = _weights(weight, offsets, there, WIDE)
    largest = tl.max(tl.max(tl.max(bits & 0x7FFF, axis=2), axis=1), axis=0)
    scale = _scale_of(_as_float(largest), UE8M0)
    tl.store(scales + here, scale)
    codes = e4m3(_as_float(bits) * tl.div_rn(1.0, scale), NATIVE)
    known = tl.load(old.to(tl.pointer_type(tl.uint8)) + offsets, mask=there, other=0)
    differ = ((codes != known) & there).to(tl.uint32)
    word = tl.sum(differ << lane, axis=2)
    place = tl.arange(0, 128)[:, None] + here // wide * _BLOCK
    column = here % wide * _BLOCK + tl.arange(0, 4)[None, :] * 32
    to = words + first_word + (place * cols + column) // 32
    tl.store(to, word.to(tl.int32, bitcast=True), mask=(place < rows) & (column < cols))


@triton.jit(do_not_specialize=["begin"])
def count(numels, first_block, chunk_of, words, counts, chunk_counts, begin, BLOCK: tl.constexpr):
    """Counts of masks that are there, for each block from `begin` on, and added up by chunk.

    Words beyond the end of a chunk are set to 0.
    """
    block = begin + tl.program_id(0)
    chunk = tl.load(chunk_of + block)
    offset = (block - tl.load(first_block + chunk)) * BLOCK
    word = tl.arange(0, BLOCK // 32)
    at = words + block.to(tl.int64) * (BLOCK // 32) + word
    there = offset + word * 32 < tl.load(numels + chunk)
    found = tl.load(at, mask=there, other=0).to(tl.uint32, bitcast=True)
    tl.store(at, 0, mask=~there)
    number = tl.sum(popcount(found))
    tl.store(counts + block, number)
    if number > 0:
        tl.atomic_add(chunk_counts + chunk, number, sem="relaxed")
