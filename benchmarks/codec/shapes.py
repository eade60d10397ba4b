"""Encodings that other systems use, written from their descriptions for a comparison of bytes.

Each keeps what decides about the bytes: how positions and values are written and what zstd (level
1) sees. A tensor that changed has a header of 16 bytes: its number, the widths of its positions,
and its count. Names, manifests and checksums of those systems are left out, in their favour.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import zstandard

from benchmarks.codec.change import Change, Changed, Indices
from deltasync.delta.host import Bits
from deltasync.wire.compression import compress, inflate

_TENSOR = struct.Struct("<IHHQ")  # number, widths of the two streams of positions, count
_COUNT = struct.Struct("<Q")
_WIDTHS = (1, 2, 4)
BASELINE = "int32 + value, zstd"
"""The coder that speeds are compared with."""

Found = list[tuple[Indices, Bits]]
"""(indices, new bits) of each tensor that changed."""


@dataclass(frozen=True, slots=True)
class Absolute:
    """int32 each."""

    def streams(self, indices: Indices, cols: int) -> list[Bits]:
        return [indices.view(np.uint32)]

    def indices(self, streams: Sequence[Bits], cols: int) -> Indices:
        return streams[0].view(np.int32)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Elements between each and the one before: u16, or a wider type if a tensor needs it."""

    def streams(self, indices: Indices, cols: int) -> list[Bits]:
        return [_narrowed(np.diff(indices, prepend=-1) - 1, 2)]

    def indices(self, streams: Sequence[Bits], cols: int) -> Indices:
        found = np.cumsum(streams[0], dtype=np.int32)
        found += np.arange(len(found), dtype=np.int32)
        return found


@dataclass(frozen=True, slots=True)
class RowsAndColumns:
    """Rows as gaps (u8 if they fit), columns as gaps within a row, or from its start (u16)."""

    def streams(self, indices: Indices, cols: int) -> list[Bits]:
        rows, columns = np.divmod(indices, np.int32(cols))
        gaps = np.diff(rows, prepend=np.int32(0))
        steps = np.diff(columns, prepend=np.int32(0))
        begins = gaps > 0
        steps[begins] = columns[begins]
        return [_narrowed(gaps, 1), _narrowed(steps, 2)]

    def indices(self, streams: Sequence[Bits], cols: int) -> Indices:
        gaps, steps = streams
        rows, along = np.cumsum(gaps, dtype=np.int32), np.cumsum(steps, dtype=np.int32)
        begins = np.flatnonzero(gaps)
        before = np.zeros(len(gaps), np.int32)  # what `along` had reached when the row began
        before[begins] = np.diff(along[begins] - steps[begins].astype(np.int32), prepend=0)
        columns = along - np.cumsum(before, dtype=np.int32)
        found: Indices = rows * np.int32(cols) + columns
        return found


@dataclass(frozen=True, slots=True)
class Shape:
    """Positions and values of all tensors that changed, one kind after the other: a zstd frame.

    Attributes:
        name: For tables.
        positions: How positions are written.
        is_xor: Whether values are XORs with the old ones, else the new ones themselves.
    """

    name: str
    positions: Absolute | Gaps | RowsAndColumns
    is_xor: bool

    def encode(self, change: Change) -> bytes:
        heads, indices, values = [], [], []
        for tensor in change.tensors:
            streams = self.positions.streams(tensor.indices, tensor.cols)
            widths = [stream.itemsize for stream in streams] + [0]
            heads.append(_TENSOR.pack(tensor.number, *widths[:2], len(tensor.indices)))
            indices += [stream.tobytes() for stream in streams]
            values.append(self._values(tensor, tensor.new).tobytes())
        return compress(b"".join((_COUNT.pack(len(heads)), *heads, *indices, *values)))

    def decode(self, data: bytes, change: Change) -> Found:
        data = bytes(inflate(data, _content_bytes(data)))
        (count,), at = _COUNT.unpack_from(data), _COUNT.size
        heads = [_TENSOR.unpack_from(data, at + n * _TENSOR.size) for n in range(count)]
        take, found = partial(_take, data), []
        at += count * _TENSOR.size
        for tensor, (_, *widths, length) in zip(change.tensors, heads, strict=True):
            streams = []
            for width in filter(None, widths):
                streams.append(take(at, f"<u{width}", length))
                at += width * length
            found.append(self.positions.indices(streams, tensor.cols))
        pairs: Found = []
        for tensor, indices in zip(change.tensors, found, strict=True):
            values = take(at, tensor.new.dtype.str, len(indices))
            at += values.nbytes
            pairs.append((indices, self._values(tensor, values, indices)))
        return pairs

    def _values(self, tensor: Changed, values: Bits, indices: Indices | None = None) -> Bits:
        """What is sent of new values, or the new values of what was sent."""
        if not self.is_xor:
            return values
        mixed: Bits = values ^ tensor.old[tensor.indices if indices is None else indices]
        return mixed


@dataclass(frozen=True, slots=True)
class DenseXor:
    """All elements of the tensors that changed, XORed with the old ones, as one zstd frame."""

    name: str

    def encode(self, change: Change) -> bytes:
        heads = [_TENSOR.pack(t.number, 0, 0, len(t.indices)) for t in change.tensors]
        mixed = [(tensor.old ^ tensor.whole).tobytes() for tensor in change.tensors]
        return compress(b"".join((_COUNT.pack(len(heads)), *heads, *mixed)))

    def decode(self, data: bytes, change: Change) -> list[Bits]:
        """unsigned[numel]: all new bits of each tensor that changed."""
        data = bytes(inflate(data, _content_bytes(data)))
        at, found = _COUNT.size + len(change.tensors) * _TENSOR.size, []
        for tensor in change.tensors:
            mixed = _take(data, at, tensor.old.dtype.str, len(tensor.old))
            found.append(mixed ^ tensor.old)
            at += mixed.nbytes
        return found


SHAPES: tuple[Shape | DenseXor, ...] = (
    Shape(BASELINE, Absolute(), is_xor=False),
    Shape("u16 gap + XOR, zstd (NeMo-RL)", Gaps(), is_xor=True),
    Shape("COO u8, u16 + value, zstd (PULSE v3.1)", RowsAndColumns(), is_xor=False),
    DenseXor("dense XOR, zstd (slime, SkyRL)"),
)


def _narrowed(numbers: Indices, least: int) -> Bits:
    """In the narrowest unsigned type from `least` bytes on that holds all of them."""
    most = int(numbers.max(initial=0))
    width = next(w for w in _WIDTHS if w >= least and most < 1 << 8 * w)
    narrow: Bits = numbers.astype(f"<u{width}")
    return narrow


def _take(data: bytes, at: int, kind: str, count: int) -> Bits:
    return np.frombuffer(data, kind, count, at)


def _content_bytes(data: bytes) -> int:
    return int(zstandard.frame_content_size(data))
