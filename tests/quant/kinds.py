"""Matrices of every kind that a quantizer may meet, the same in every version of everything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from deltasync.quant.rounding import largest

FINITE = ("usual", "sparse", "zero", "denormal", "tiny", "huge", "any")
KINDS = (*FINITE, "infinite", "nan")

_SHAPES = ((256, 384), (130, 224), (7, 96), (1, 32))
"""Whole blocks, and ragged ones that every form takes."""

_EXPONENTS = {"denormal": (0, 1), "tiny": (1, 24), "huge": (236, 254), "any": (0, 254)}
_USUAL = 112, 126


def matrix(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    """[*shape] bfloat16 of one of `KINDS`, made of the bits of PCG64, which never change."""
    raw = np.random.PCG64(seed).random_raw(shape[0] * shape[1]).astype(np.int64)
    low, high = _EXPONENTS.get(kind, _USUAL)
    bits = raw & 0x807F | ((raw >> 16 & 0xFFFF) % (high - low) + low) << 7
    rare = (raw >> 40 & 0x3FF) == 0
    if kind == "zero":
        bits &= 0x8000
    elif kind == "sparse":  # most rows and blocks have but zeros
        bits[~rare] &= 0x8000
    elif kind == "infinite":
        bits[rare] = bits[rare] & 0x8000 | 0x7F80
    elif kind == "nan":
        bits[rare] |= 0x7F81
    return _of_bits(bits, shape)


def cases(kinds: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """(name, matrix): each kind in several shapes."""
    for kind in kinds:
        for place, shape in enumerate(_SHAPES):
            name = f"{kind} {shape[0]}x{shape[1]}"
            yield name, matrix(kind, shape, 10 * KINDS.index(kind) + place)


def every_maximum() -> Tensor:
    """[32608, 32] bfloat16: each magnitude below 1.75 * 2^127 is the largest of a row."""
    count = 0x7F60
    raw = np.random.PCG64(7).random_raw(count * 32).astype(np.int64).reshape(count, 32)
    magnitudes = np.arange(count)
    bits = (raw & 0x7FFF) % (magnitudes[:, None] + 1)
    bits[:, 5] = magnitudes
    return _of_bits(bits | raw >> 8 & 0x8000, (count, 32))


def _of_bits(bits: np.ndarray, shape: tuple[int, int]) -> Tensor:
    words = bits.astype(np.uint16).view(np.int16).reshape(shape)
    return torch.from_numpy(words).view(torch.bfloat16)


def bits_of(part: Tensor) -> Tensor:
    """[...] integers: the bits of a part, and one NaN for all NaNs."""
    part = part.contiguous()
    if part.dtype == torch.float8_e4m3fn:
        codes = part.view(torch.uint8)
        return codes.masked_fill(codes & 0x7F == 0x7F, 0x7F)
    if part.is_floating_point():
        part = torch.where(part.isnan(), torch.nan, part)
        return part.view({2: torch.int16, 4: torch.int32}[part.element_size()])
    return part


def digest(part: Tensor) -> str:
    """Of the bits, in hexadecimal digits."""
    return hashlib.blake2b(bits_of(part).numpy().tobytes(), digest_size=8).hexdigest()


def peak_of(*weights: Tensor) -> Tensor:
    """bfloat16[1]: the largest magnitude in any of them, or NaN."""
    return largest(torch.cat([weight.flatten() for weight in weights]), 0)
