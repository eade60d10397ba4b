"""The arithmetic of served forms: scales and codes of the trainer's weights, bit for bit.

Each function is the form's of `deltasync.quant`, in which the formulas and their sources are:
scale_of makes the scale of a block, divisor_of what its elements are divided by, code_of a code.
Divisions are those of IEEE 754, as torch's are; Triton's own are not exact on GPUs. A product is
never added to in one rounding: launches say `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.delta.kernels.triton_base import aligned, rounded
from deltasync.quant import reads

_WIDE, _FORM = tl.constexpr(reads.WIDE), tl.constexpr(reads.FORM)
_BLOCK_FP8_UE8M0, _FP8 = tl.constexpr(reads.BLOCK_FP8_UE8M0), tl.constexpr(reads.FP8)
_INT8, _INT4 = tl.constexpr(reads.INT8), tl.constexpr(reads.INT4)
_MXFP8, _NVFP4 = tl.constexpr(reads.MXFP8), tl.constexpr(reads.NVFP4)

_SIDE = tl.constexpr(128)
_LARGEST_FP8 = tl.constexpr(448.0)
_INFINITY = tl.constexpr(0x7F80)  # in bfloat16: NaN is above
_NAN = tl.constexpr(0x7FC00000)
_NAN_FP8 = tl.constexpr(0x7F)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it is rounded to an integer
_MAGIC_BITS = tl.constexpr(0x4B400000)
_SMALL = tl.constexpr(2.0**-64)
_SMALLEST_FP8 = tl.constexpr(0x3C800000)  # 2^-6, the smallest that is normal
_POWER_20 = tl.constexpr(2.0**20)
_POWER_100 = tl.constexpr(2.0**100)
_POWER_120 = tl.constexpr(2.0**120)


@triton.jit
def weights_at(address, offsets, mask, WIDE: tl.constexpr, ALIGNED: tl.constexpr):
    """uint32: bfloat16 bits of elements; WIDE reads float32. ALIGNED: See `aligned`."""
    if WIDE:
        raw = tl.load(aligned(address, tl.uint32, ALIGNED) + offsets, mask=mask, other=0)
        bits = rounded(raw)
    else:
        bits = tl.load(aligned(address, tl.uint16, ALIGNED) + offsets, mask=mask, other=0)
    return bits.to(tl.uint32)


@triton.jit
def _as_float(bits):
    """float32 of bfloat16 bits."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _as_bfloat16(x):
    """float32 below 2^100, rounded to what bfloat16 has; 0 for -0, and for what becomes it.

    A sum with 1.5 * 2^16 times a power of two is rounded to 2^-7 of that power, ties to even.
    """
    power = tl.maximum(x.to(tl.uint32, bitcast=True) & 0x7F800000, 0x800000)
    large = power.to(tl.float32, bitcast=True) * 98304.0
    return (x + large) - large


@triton.jit
def _quotient(x, scale):
    """Quotients of numbers that bfloat16 has, rounded to it: a product rounds to the same.

    Two integers below 2^8 have no quotient amid two neighbours in bfloat16, nor one that is nearer
    to their middle than 2^-17 of itself; the product is off by 2^-22 at most. Of what is below
    2^-126 it only counts whether it is rounded to 0. That is so up to 2^-134, and the product is
    rounded to multiples of 2^-149.
    """
    power = tl.where(scale < _SMALL, 1 / _SMALL, 1.0)  # the inverse of a smaller scale is infinite
    return _as_bfloat16((x * power) * tl.div_rn(1.0, scale * power))


@triton.jit
def _integer(x):
    """uint32: the nearest integers of float32 below 2^22, ties to even, as two's complements."""
    return (x + _MAGIC).to(tl.uint32, bitcast=True) - _MAGIC_BITS


@triton.jit
def e4m3_size(x):
    """uint32: the code of abs(x), shifted left by 20, for numbers that are below 464.

    A sum with 2^20 times a power of two is rounded to an eighth of that power, ties to even. Powers
    below 2^-6 count as that. What then exceeds the power is exact, and so is 2^-120 of it, in which
    float32 has the exponent that a code has, and the same mantissa.
    """
    power = tl.maximum(x.to(tl.uint32, bitcast=True) & 0x7F800000, _SMALLEST_FP8)
    power = power.to(tl.float32, bitcast=True)
    total = tl.abs(x) + power * _POWER_20
    return tl.fma(total, 1 / _POWER_120, power * (-1 / _POWER_100)).to(tl.uint32, bitcast=True)


@triton.jit
def _e4m3(x):
    """uint32: as `as_fp8` of deltasync/quant/rounding.py.

    GPUs convert by themselves, but ptxas 12.8 makes wrong code of pairs of such conversions.
    """
    code = e4m3_size(tl.minimum(tl.abs(x), _LARGEST_FP8)) >> 20
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code | sign, _NAN_FP8)


@triton.jit
def four_e4m3(low, high, factor):
    """uint32: four codes, without signs, of products of bfloat16 with a factor, all below 464.

    Args:
        low, high: Pairs of bfloat16, the first one in the low half.
        factor: float32.
    """
    first = e4m3_size((low << 16).to(tl.float32, bitcast=True) * factor)
    second = e4m3_size((low & 0xFFFF0000).to(tl.float32, bitcast=True) * factor)
    third = e4m3_size((high << 16).to(tl.float32, bitcast=True) * factor)
    fourth = e4m3_size((high & 0xFFFF0000).to(tl.float32, bitcast=True) * factor)
    return ((first >> 20) + (second >> 12)) + ((third >> 4) + (fourth << 4))


@triton.jit
def _of_e4m3(code):
    """float32 of float8_e4m3fn bits without a sign."""
    value = (code << 20).to(tl.float32, bitcast=True) * _POWER_120
    return tl.where(code == _NAN_FP8, float("nan"), value)


@triton.jit
def _e2m1(x):
    """uint32: E2M1 codes of float32. See `e2m1` of deltasync/quant/four_bits.py."""
    size = (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = tl.minimum(_integer(size * 2), _integer(size) + 2)
    code = tl.minimum(tl.minimum(code, _integer(size * 0.5) + 4), 7)
    return code | ((x < 0).to(tl.uint32) << 3)


@triton.jit
def _power_above(x):
    """uint32: as `power_of_two_above` of deltasync/quant/rounding.py; 256 for NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)


@triton.jit
def scale_of(peak, total, FORM: tl.constexpr):
    """uint32: bits of the scale of a block, as kernels keep it.

    Args:
        peak: bfloat16 bits of its largest magnitude.
        total: float32, the scale of the whole, if the form has one.
        FORM: See `reads`.
    """
    amax = _as_float(peak)
    if FORM <= _INT4:
        if FORM <= _BLOCK_FP8_UE8M0:
            scale = tl.div_rn(tl.maximum(amax, 1e-4), _LARGEST_FP8)
            if FORM == _BLOCK_FP8_UE8M0:
                exponent = tl.minimum(tl.maximum(_power_above(scale), 1), 254)
                power = (exponent << 23).to(tl.float32, bitcast=True)
                scale = tl.where(peak < _INFINITY, power, amax)
        else:  # compressed-tensors: all but this is rounded to bfloat16
            steps: tl.constexpr = 448.0 if FORM == _FP8 else (127.5 if FORM == _INT8 else 7.5)
            narrow = rounded(tl.div_rn(amax, steps).to(tl.uint32, bitcast=True))
            scale = tl.where(narrow == 0, 0.0078125, _as_float(narrow))
        bits = tl.where(peak > _INFINITY, _NAN, scale.to(tl.uint32, bitcast=True))
    elif FORM == _MXFP8:
        exponent = (peak + 0x20) >> 7
        bits = tl.where(exponent >= 255, 255, tl.maximum(exponent, 8) - 8)
    elif FORM == _NVFP4:
        sixth = rounded(tl.div_rn(amax, 6.0).to(tl.uint32, bitcast=True))
        bits = _e4m3(total * _as_float(sixth)) & 0x7F
        bits = tl.where(bits == 0, 0x20, bits)  # 0.125
    else:
        scale = tl.div_rn(amax, 6.0 * total)
        scale = tl.where(scale == 0, 1.0, scale)
        scale = tl.where(scale < 0.001953125, 0.001953125, scale)
        bits = _e4m3(scale) & 0x7F
    return bits


@triton.jit
def divisor_of(scale, total, FORM: tl.constexpr):
    """float32: what `code_of` takes, of the bits of a scale: a divisor, or its inverse."""
    if FORM <= _INT4:
        divisor = scale.to(tl.float32, bitcast=True)
        if FORM <= _BLOCK_FP8_UE8M0:
            divisor = tl.div_rn(1.0, divisor)
    elif FORM == _MXFP8:  # an exponent; a product with the inverse is the quotient
        inverse = tl.where(scale >= 254, 0x400000, (254 - scale) << 23)
        inverse = tl.where(scale == 255, _NAN, inverse).to(tl.uint32)
        divisor = inverse.to(tl.float32, bitcast=True)
    elif FORM == _NVFP4:
        divisor = tl.div_rn(_of_e4m3(scale), total)
    else:
        divisor = _of_e4m3(scale) * total
    return divisor


@triton.jit
def code_of(weight, divisor, FORM: tl.constexpr):
    """uint32: codes of bfloat16 bits."""
    x = _as_float(weight)
    if FORM <= _BLOCK_FP8_UE8M0:
        code = _e4m3(x * divisor)
    elif FORM == _FP8:
        code = _e4m3(_quotient(x, divisor))
    elif FORM <= _INT4:
        x = _quotient(x, divisor)
        x = tl.where(x == x, x, 0.0 if FORM == _INT8 else -8.0)  # NaN is code 0
        if FORM == _INT8:
            code = _integer(tl.minimum(tl.maximum(x, -128.0), 127.0)) & 0xFF
        else:
            code = _integer(tl.minimum(tl.maximum(x, -8.0), 7.0)) + 8
    elif FORM == _MXFP8:
        code = _e4m3(_as_bfloat16(x * divisor))
    else:
        code = _e2m1(tl.div_rn(x, divisor))
    return code


@triton.jit
def load_scale(scales, at, mask, FORM: tl.constexpr):
    """uint32: bits of scales; those of 1 where `mask` leaves them out."""
    if FORM <= _INT4:
        scale = tl.load(scales.to(tl.pointer_type(tl.uint32)) + at, mask=mask, other=0x3F800000)
    else:
        scale = tl.load(scales.to(tl.pointer_type(tl.uint8)) + at, mask=mask, other=0x38)
    return scale.to(tl.uint32)


@triton.jit
def store_scale(scales, at, scale, mask, FORM: tl.constexpr):
    """Write uint32 bits of scales as kernels keep them."""
    if FORM <= _INT4:
        tl.store(scales.to(tl.pointer_type(tl.uint32)) + at, scale, mask=mask)
    else:
        tl.store(scales.to(tl.pointer_type(tl.uint8)) + at, scale.to(tl.uint8), mask=mask)


@triton.jit
def load_total(address, FORM: tl.constexpr):
    """float32: the scale of the whole, if the form has one beside those of blocks."""
    total = 1.0
    if FORM >= _NVFP4:
        total = tl.load(address.to(tl.pointer_type(tl.float32)))
    return total


@triton.jit
def codes_at(
    address, offsets, mask, start, quantized, TYPE: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """Elements of codes, by scales that are known.

    Args:
        address: Of the weight that the first element of a tile begins with.
        offsets: Of elements from there on.
        mask: Which to read.
        start: Where the tile begins in its parameter, in elements.
        quantized: Where three numbers stand: the address of the scales, how many weights in a row
            share one, and the address of the scale of the whole. Of blocks of 128 x 128 the second
            one is the columns of the matrix.
        TYPE: Of the elements.
        READ: See `reads`.

    The first, and the last two, may be one for all elements, or one for each.
    """
    FORM: tl.constexpr = READ // _FORM
    WIDE: tl.constexpr = (_WIDE & READ) != 0
    CODES: tl.constexpr = 8 if FORM == _INT4 else (2 if FORM >= _NVFP4 else 1)
    scales, width = tl.load(quantized), tl.load(quantized + 1)
    total = load_total(tl.load(quantized + 2), FORM)
    position = (start + offsets) * CODES
    if FORM <= _BLOCK_FP8_UE8M0:
        wide = (width + _SIDE - 1) // _SIDE
        block = position // width // _SIDE * wide + position % width // _SIDE
    else:
        block = position // width
    scale = load_scale(scales, block, mask, FORM)
    divisor = divisor_of(scale, total, FORM)
    elements = tl.zeros_like(scale)
    for nth in tl.static_range(CODES):
        weight = weights_at(address, offsets * CODES + nth, mask, WIDE, False)
        code = code_of(weight, divisor, FORM)
        elements = elements | (code << (4 * nth))
    return elements.to(TYPE)
