"""Kernels that quantize matrices and compare the codes: what they write is scales and masks.

Three go over blocks of different shapes: squares, groups of a row, and rows. Each takes a table
with a column for each matrix, int64[8, num_matrices]: the address of the weight, of the codes that
it is compared with, and of its scales; rows; columns; the first word of its masks; its first
program; the address of the scale of the whole. And matrix_of, int32[programs]: whose each is.
ALIGNED: Weights and codes begin at multiples of 16 bytes, and have a multiple of 16 elements.
FORM, WIDE: See `reads`. TYPE, CODES: Of an element that is served, and how many codes it has. SPAN:
Weights that a program goes over at once.

Masks are int32 words, a bit for each element that differs, in the order of the elements; those of a
matrix begin where those of a tile do. A program writes all bits of the words that it has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels.triton_base import aligned
from deltasync.quant.triton_forms import (
    code_of,
    divisor_of,
    four_e4m3,
    load_scale,
    load_total,
    scale_of,
    store_scale,
    weights_at,
)

SPAN = 4096
"""Weights that one program goes over at once."""

_SIDE = tl.constexpr(128)
_INFINITY = tl.constexpr(0x7F80)


@triton.jit
def _single_codes(
    weight, old, at, there, scales, here,
    FORM: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """uint32: which of the weights `at` differ, 1 bit for each, once their scale is stored."""
    bits = weights_at(weight, at, there, WIDE, ALIGNED)
    known = tl.load(aligned(old, tl.uint8, ALIGNED) + at, mask=there, other=0)
    peak = tl.max(tl.max(tl.max(bits & 0x7FFF, axis=2), axis=1), axis=0)
    scale = scale_of(peak, 1.0, FORM)
    store_scale(scales, here, scale, True, FORM)
    codes = code_of(bits, divisor_of(scale, 1.0, FORM), FORM)
    return ((codes != known) & there).to(tl.uint32)


@triton.jit
def _four_of_infinite(low, high, signs):
    """uint32: four codes if the scale is infinite: 0, or NaN if the weight is infinite too."""
    is_nan = tl.where((low & 0x7FFF) == _INFINITY, 0xFF, 0)
    is_nan |= tl.where((low & 0x7FFF0000) == (_INFINITY << 16), 0xFF00, 0)
    is_nan |= tl.where((high & 0x7FFF) == _INFINITY, 0xFF0000, 0)
    is_nan |= tl.where((high & 0x7FFF0000) == (_INFINITY << 16), 0xFF000000, 0)
    return (signs & (is_nan ^ 0xFFFFFFFF)) | (is_nan & 0x7F7F7F7F)


@triton.jit
def _four_codes(weight, old, at, there, scales, here, FORM: tl.constexpr):
    """uint32: which of the weights in fours `at` differ, 4 bits for each, as `_single_codes` does.

    Weights are bfloat16 and aligned. GPUs execute integer instructions at half the rate of others,
    so that most of these work on two or four weights at once.
    """
    fours = tl.load(aligned(weight, tl.uint64, True) + at, mask=there, other=0)
    known = tl.load(aligned(old, tl.uint32, True) + at, mask=there, other=0)
    low, high = fours.to(tl.uint32), (fours >> 32).to(tl.uint32)
    # Without their signs, and with what is rounded off: it does not change which one is largest.
    peaks = tl.maximum(tl.maximum(low * 2, low << 17), tl.maximum(high * 2, high << 17))
    peak = tl.max(tl.max(tl.max(peaks, axis=2), axis=1), axis=0) >> 17
    scale = scale_of(peak, 1.0, FORM)
    store_scale(scales, here, scale, True, FORM)
    divisor = divisor_of(scale, 1.0, FORM)
    # The factor writes each sign a second time, 8 bits above: where a word of codes has two.
    signs = ((low & 0x80008000) * 0x101) >> 16
    signs += ((high & 0x80008000) * 0x101) & 0xFFFF0000
    if peak < _INFINITY:
        codes = four_e4m3(low, high, divisor) + signs
    else:
        codes = tl.where(peak > _INFINITY, 0x7F7F7F7F, _four_of_infinite(low, high, signs))
    differ = codes ^ known
    # The highest bit of a byte: whether any of its bits is set.
    differ = (((differ & 0x7F7F7F7F) + 0x7F7F7F7F) | differ) & 0x80808080
    return (differ * 0x00204081) >> 28


@triton.jit(do_not_specialize=["num_matrices"])
def compare_squares(
    table, matrix_of, words, num_matrices,
    FORM: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program has 128 x 128 weights, which share a scale.

    Columns are a multiple of 32, below 2^24; rows are below 2^31.
    """
    EACH: tl.constexpr = 4 if ALIGNED and not WIDE else 1  # weights that are looked at together
    WORD: tl.constexpr = 32 // EACH
    block = tl.program_id(0)
    at = table + tl.load(matrix_of + block)
    weight, old, scales = tl.load(at), tl.load(at + num_matrices), tl.load(at + 2 * num_matrices)
    rows = tl.load(at + 3 * num_matrices).to(tl.int32)
    cols = tl.multiple_of(tl.load(at + 4 * num_matrices).to(tl.int32), 32)
    words += tl.load(at + 5 * num_matrices)
    here = block - tl.load(at + 6 * num_matrices).to(tl.int32)
    wide = (cols + _SIDE - 1) // _SIDE
    top, left = here // wide * _SIDE, here % wide * _SIDE
    first = (top.to(tl.int64) * cols + left) // EACH
    row, column = tl.arange(0, 128)[:, None], tl.arange(0, 4)[None, :] * 32
    there = (row < rows - top) & (column < cols - left)
    cell = row * cols + column
    lane = tl.arange(0, WORD)[None, None, :]
    of_words = first + ((cell // EACH)[:, :, None] + lane)
    if EACH == 4:
        differ = _four_codes(weight, old, of_words, there[:, :, None], scales, here, FORM)
    else:
        differ = _single_codes(
            weight, old, of_words, there[:, :, None], scales, here, FORM, WIDE, ALIGNED
        )
    word = tl.sum(differ << (lane * EACH), axis=2)
    tl.store(words + (first // WORD + cell // 32), word.to(tl.int32, bitcast=True), mask=there)


@triton.jit
def _mark(
    bits, divisor, old, words, first, end,
    TYPE: tl.constexpr, CODES: tl.constexpr, SPAN: tl.constexpr,
    FORM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the masks of the elements that SPAN weights in a row make.

    Args:
        bits: uint32[groups, weights of each], of bfloat16.
        divisor: float32[groups, 1], see `code_of`.
        old: Address of the first element of the matrix that they are compared with.
        words: Its masks.
        first, end: Numbers of the first element, a multiple of 32, and of the one after the last.
    """
    codes = code_of(bits, divisor, FORM)
    ELEMENTS: tl.constexpr = SPAN // CODES
    if CODES > 1:
        beside = tl.reshape(codes, [ELEMENTS, CODES])
        elements = tl.sum(beside << (tl.arange(0, CODES)[None, :] * 4), axis=1)
    else:
        elements = tl.reshape(codes, [ELEMENTS])
    at = first + tl.arange(0, ELEMENTS)
    there = at < end
    known = tl.load(aligned(old, TYPE, ALIGNED) + at, mask=there, other=0).to(tl.uint32)
    differ = tl.reshape(((elements != known) & there).to(tl.uint32), [ELEMENTS // 32, 32])
    word = tl.sum(differ << tl.arange(0, 32)[None, :], axis=1)
    place = first // 32 + tl.arange(0, ELEMENTS // 32)
    tl.store(words + place, word.to(tl.int32, bitcast=True), mask=place * 32 < end)


@triton.jit(do_not_specialize=["num_matrices"])
def compare_groups(
    table, matrix_of, words, num_matrices,
    GROUP: tl.constexpr, SPAN: tl.constexpr, TYPE: tl.constexpr, CODES: tl.constexpr,
    FORM: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program has SPAN weights in a row, of which each GROUP share a scale.

    GROUP: A power of two that divides the columns, or 0 if the scale is that of the whole.
    """
    program = tl.program_id(0)
    at = table + tl.load(matrix_of + program)
    weight, old = tl.load(at), tl.load(at + num_matrices)
    scales, whole = tl.load(at + 2 * num_matrices), tl.load(at + 7 * num_matrices)
    numel = tl.load(at + 3 * num_matrices) * tl.load(at + 4 * num_matrices)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    here = program - tl.load(at + 6 * num_matrices)
    offsets = here * SPAN + tl.arange(0, SPAN)
    bits = weights_at(weight, offsets, offsets < numel, WIDE, ALIGNED)
    if GROUP == 0:
        bits = bits[None, :]
        scale = load_scale(whole, tl.zeros([1], tl.int32), True, FORM)
        divisor = divisor_of(scale, 1.0, FORM)
    else:
        GROUPS: tl.constexpr = SPAN // GROUP
        bits = tl.reshape(bits, [GROUPS, GROUP])
        total = load_total(whole, FORM)
        peak = tl.max(bits & 0x7FFF, axis=1)
        scale = scale_of(peak, total, FORM)
        group = here * GROUPS + tl.arange(0, GROUPS)
        store_scale(scales, group, scale, group * GROUP < numel, FORM)
        divisor = divisor_of(scale, total, FORM)
    masks = words + tl.load(at + 5 * num_matrices)
    _mark(
        bits, divisor[:, None], old, masks, here * (SPAN // CODES), numel // CODES,
        TYPE, CODES, SPAN, FORM, ALIGNED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_matrices"])
def compare_rows(
    table, matrix_of, words, num_matrices,
    SPAN: tl.constexpr, TYPE: tl.constexpr, CODES: tl.constexpr,
    FORM: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program has a row, which has a scale, and reads it twice.

    A row has a multiple of 32 elements of codes.
    """
    program = tl.program_id(0)
    at = table + tl.load(matrix_of + program)
    weight, old = tl.load(at), tl.load(at + num_matrices)
    cols = tl.multiple_of(tl.load(at + 4 * num_matrices), 32)
    row = program - tl.load(at + 6 * num_matrices)
    weight += row * cols * (4 if WIDE else 2)
    lane = tl.arange(0, SPAN)
    largest = tl.zeros([SPAN], tl.uint32)
    begin = 0
    while begin < cols:
        bits = weights_at(weight, begin + lane, begin + lane < cols, WIDE, ALIGNED)
        largest = tl.maximum(largest, bits & 0x7FFF)
        begin += SPAN
    scale = scale_of(tl.max(largest, axis=0), 1.0, FORM)
    store_scale(tl.load(at + 2 * num_matrices), row, scale, True, FORM)
    divisor = divisor_of(scale, 1.0, FORM)
    masks = words + tl.load(at + 5 * num_matrices)
    width = tl.multiple_of(cols // CODES, 32)
    begin = 0
    while begin < cols:
        bits = weights_at(weight, begin + lane, begin + lane < cols, WIDE, ALIGNED)
        first = row * width + begin // CODES
        _mark(
            bits[None, :], divisor, old, masks, first, (row + 1) * width,
            TYPE, CODES, SPAN, FORM, ALIGNED,
        )  # fmt: skip
        begin += SPAN


@triton.jit(do_not_specialize=["num_matrices"])
def find_peaks(
    table, matrix_of, peaks, num_matrices,
    SPAN: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The bfloat16 bits of the largest magnitudes of matrices, or of several that share one.

    table: int64[4, num_matrices]: address of the weight; elements; first program; place in `peaks`.
    matrix_of: int32[programs], whose each is.
    peaks: int32[n], zeros at first.
    """
    program = tl.program_id(0)
    at = table + tl.load(matrix_of + program)
    weight, numel = tl.load(at), tl.load(at + num_matrices)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    offsets = (program - tl.load(at + 2 * num_matrices)) * SPAN + tl.arange(0, SPAN)
    bits = weights_at(weight, offsets, offsets < numel, WIDE, ALIGNED)
    peak = tl.max(bits & 0x7FFF, axis=0).to(tl.int32)
    to = peaks + tl.load(at + 3 * num_matrices)
    if peak > tl.load(to):  # it only grows
        tl.atomic_max(to, peak, sem="relaxed")
