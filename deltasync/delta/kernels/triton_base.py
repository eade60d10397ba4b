"""What Triton kernels share: types, sizes of what a program works on, and digests.

Sums of digests are 64-bit and wrap around, so that the order in which programs add does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltasync.wire.digest import GOLDEN_RATIO, MULTIPLIERS

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on CPUs: Triton looks at `TRITON_INTERPRET` when they are defined."""

TYPES = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}

GOLDEN = tl.constexpr(GOLDEN_RATIO)
_FIRST = tl.constexpr(MULTIPLIERS[0])
_SECOND = tl.constexpr(MULTIPLIERS[1])


@triton.jit
def seed_of(key, position):
    """What `mix` adds bits to. Linear: seeds of neighbours are `GOLDEN` apart."""
    return key + position.to(tl.uint64) * GOLDEN


@triton.jit
def mix(seed, bits):
    """SplitMix64's finaliser of seed, position and bits: wire.digest.mix64."""
    x = seed + bits.to(tl.uint64)
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def add_up(sums, place, terms):
    """Add uint64 terms up into one place."""
    tl.atomic_add(sums + place, tl.sum(terms).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def popcount(words):
    """Bits set in each uint32."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def rounded(raw):
    """bfloat16 bits of float32 bits, to the nearest even, as delta.bits does: one NaN."""
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return tl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def load(
    address, offsets, mask, TYPE: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Bits of the wire's type; NARROW reads float32 that goes as bfloat16."""
    if NARROW:
        raw = tl.load(address.to(tl.pointer_type(tl.uint32)) + offsets, mask=mask, other=0)
        bits = rounded(raw)
    else:
        bits = tl.load(aligned(address, TYPE, ALIGNED) + offsets, mask=mask, other=0)
    return bits


@triton.jit
def aligned(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer that the compiler knows to be fit for wide loads, if it is."""
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer
