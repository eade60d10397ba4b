"""How two versions of weights differ: how many elements, by how much, and in how many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Flat, dtype_of, torch_dtype
from deltasync.delta.host import Bits
from deltasync.delta.kernels.host import changed, unsigned
from deltasync.delta.readers import WireReader
from deltasync.dtypes import Dtype
from deltasync.errors import LayoutMismatch
from deltasync.files.patch import CHUNK_NUMEL
from deltasync.files.steps import in_order
from deltasync.wire.compression import compress

Counts: TypeAlias = NDArray[np.signedinteger]

MAX_STEP = 128
"""Steps of so many ULPs and more are counted together."""

_EXPONENTS = 256  # biased, of a float32
_CHUNKS = 16  # counted at once: the larger they are, the less their number costs
_ESCAPE = 255  # of encodings in bytes: what follows says more


@dataclass(frozen=True, slots=True, eq=False)
class Sparsity:
    """What changed between two versions of a tensor, or of many: `sum(found, Sparsity())`.

    Attributes:
        numel: Elements compared.
        changed: Elements whose bits differ.
        steps: int64[MAX_STEP + 1], changed elements by their distance in ULPs, the last for all
            that moved as far or further. -0.0 is one step below 0.0. Integers count as they are.
        exponents: int64[2, 256]: elements, and changed ones, by the biased exponent that their old
            value has as a float32 (127 for values in [1, 2)). Floating dtypes only.
        encodings: Bytes that the changes take in some encodings, without headers. `diff` makes
            "int32 + value", or "dense"; either goes through zstd where that is asked for.
    """

    numel: int = 0
    changed: int = 0
    steps: Counts = field(default_factory=lambda: np.zeros(MAX_STEP + 1, np.int64))
    exponents: Counts = field(default_factory=lambda: np.zeros((2, _EXPONENTS), np.int64))
    encodings: Mapping[str, int] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """The share of elements that changed; 0 where there are none."""
        return self.changed / self.numel if self.numel else 0.0

    def __add__(self, other: Sparsity) -> Sparsity:
        names = dict.fromkeys((*self.encodings, *other.encodings))
        return Sparsity(
            self.numel + other.numel,
            self.changed + other.changed,
            self.steps + other.steps,
            self.exponents + other.exponents,
            {name: self.encodings.get(name, 0) + other.encodings.get(name, 0) for name in names},
        )


def sparsity(
    old: Tensor, new: Tensor, *, exponents: bool = True, encodings: bool = True
) -> Sparsity:
    """Compare two versions of a tensor bit for bit, chunk by chunk, wherever they live.

    Args:
        old: The version that a receiver holds.
        new: The one to come; of `old`'s dtype or of another floating dtype, which is then rounded
            to `old`'s. Same shape and device.
        exponents: Count elements by exponent, which reads all of `old` once more.
        encodings: Work out the bytes of encodings, which compresses the changes.

    Raises:
        LayoutMismatch: The shapes differ.
        ConfigError: The dtypes cannot be compared, or a tensor has no plain storage.
    """
    if new.shape != old.shape:
        raise LayoutMismatch(f"shape {tuple(new.shape)} against {tuple(old.shape)}")
    reader, held = WireReader.of(new, dtype_of(old), name="new"), Flat.of(old, name="old")
    step, total = CHUNK_NUMEL, Sparsity()
    if not encodings:  # which alone depend on where chunks end
        step *= _CHUNKS
    for start in range(0, held.numel, step):
        stop = min(start + step, held.numel)
        before, after = held.read(start, stop), reader.read(start, stop)
        positions = changed(after, before)
        new_bits, old_bits = (
            unsigned(one.index_select(0, positions).cpu()) for one in (after, before)
        )
        steps = _steps(old_bits, new_bits, held.dtype)
        far = np.minimum(np.abs(steps), MAX_STEP)
        total += Sparsity(
            stop - start,
            len(positions),
            np.bincount(far, minlength=MAX_STEP + 1),
            _exponents(before, positions, held.dtype) if exponents else Sparsity().exponents,
            _encodings(stop - start, positions, new_bits, steps) if encodings else {},
        )
    return total


def _steps(before: Bits, after: Bits, dtype: Dtype) -> Counts:
    """int[k]: signed distances of unsigned[k] bits in ULPs, cut off where nobody counts them."""
    old, new = (in_order(bits, dtype) for bits in (before, after))
    if dtype.item_size < 8:
        return new - old
    is_up = new > old
    distance = np.where(is_up, new - old, old - new).view(np.uint64)  # which may wrap around
    cut = np.minimum(distance, np.uint64(1 << 32)).astype(np.int64)
    return np.where(is_up, cut, -cut)


def _exponents(bits: Tensor, changed: Tensor, dtype: Dtype) -> Counts:
    """int64[2, 256]: of int[n] old bits, and of those at int32[k] positions; 0 without any."""
    if not dtype.is_floating:
        return Sparsity().exponents
    values = bits.view(torch_dtype(dtype)).float()
    biased = (values.view(torch.int32) >> 23) & (_EXPONENTS - 1)
    counts = [b.bincount(minlength=_EXPONENTS) for b in (biased, biased[changed])]
    return torch.stack(counts).cpu().numpy()


def _encodings(numel: int, changed: Tensor, values: Bits, steps: Counts) -> dict[str, int]:
    """Bytes by encoding. Steps in bytes tell new bits from old ones without loss."""
    positions = changed.cpu().numpy()
    gaps = np.diff(positions, prepend=-1) - 1
    zigzag = np.where(steps < 0, -2 * steps - 1, 2 * steps)
    is_far = zigzag >= _ESCAPE
    near = np.where(is_far, _ESCAPE, zigzag).astype(np.uint8)
    plain = positions.tobytes() + values.tobytes()
    wide = (_gap_bytes(gaps, 2), values.tobytes())
    small = (_gap_bytes(gaps, 1), near.tobytes(), values[is_far].tobytes())
    return {
        "dense": numel * values.itemsize,
        "bitmap + value": values.nbytes + (-(-numel // 8) if len(values) else 0),
        "int32 + value": len(plain),
        "int32 + value, zstd": _compressed(plain),
        "u16 gap + value": len(b"".join(wide)),
        "u16 gap + value, zstd": _compressed(*wide),
        "u8 gap + u8 step": len(b"".join(small)),
        "u8 gap + u8 step, zstd": _compressed(*small),
    }


def _gap_bytes(gaps: Counts, width: int) -> bytes:
    """How many are unchanged before each that is not; the largest code says: so many more."""
    most = (1 << 8 * width) - 1
    codes, places = np.full(len(gaps) + int((gaps // most).sum()), most), gaps // most + 1
    codes[places.cumsum() - 1] = gaps % most
    return codes.astype(f"<u{width}").tobytes()


def _compressed(*streams: bytes) -> int:
    """Each by itself, since they look different."""
    return sum(len(compress(stream)) for stream in streams if stream)
