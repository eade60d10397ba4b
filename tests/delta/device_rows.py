"""Rows that the Triton kernels of `block` code and decode, checked against numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import INTEGERS
from deltasync.delta.codecs import blocks, device_blocks
from deltasync.delta.codecs.base import Bits, SparseRow
from deltasync.delta.codecs.blocks import Shape
from deltasync.delta.codecs.device_blocks import DeviceBlocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placed(bits: Bits) -> Tensor:
    """int[n]: unsigned[n] bits on the device."""
    own = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
    return torch.from_numpy(own.copy()).view(INTEGERS[bits.itemsize]).to(DEVICE)


def joined(parts: list[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(DEVICE)


def old_of(row: SparseRow) -> Bits:
    assert row.old is not None
    return row.old


def encoded(rows: list[SparseRow]) -> DeviceBlocks:
    return device_blocks.encode(
        joined([row.indices for row in rows]),
        placed(np.concatenate([row.new for row in rows])),
        placed(np.concatenate([old_of(row) for row in rows])),
        np.array([len(row.indices) for row in rows]),
        np.array([row.span for row in rows]),
        rows[0].dtype,
    )


def index_block(row: SparseRow) -> bytes:
    """What numpy makes, in the shape that the device chooses."""
    bits = device_blocks.likely_shape(len(row.indices), row.span).block_bits
    most = int(np.bincount(row.indices >> bits).max())
    return blocks.encode_indices(row.indices, Shape(bits, most.bit_length()), row.span)


def check(rows: list[SparseRow]) -> None:
    """Blocks are those of numpy, and rows come back."""
    made = encoded(rows)
    assert bytes(made.index.tolist()) == b"".join(map(index_block, rows))
    values = [blocks.encode_values(row.new, old_of(row), row.dtype) for row in rows]
    assert bytes(made.value.tolist()) == b"".join(values)
    assert made.value_bytes.tolist() == list(map(len, values))
    counts, spans = (
        np.array([len(row.indices) for row in rows]),
        np.array([row.span for row in rows]),
    )
    found = device_blocks.decode_indices(made.index, made.index_bytes, counts, spans)
    assert torch.equal(found, joined([row.indices for row in rows]))
    old = placed(np.concatenate([old_of(row) for row in rows]))
    new = device_blocks.decode_values(made.value, made.value_bytes, counts, old, rows[0].dtype)
    assert torch.equal(new, placed(np.concatenate([row.new for row in rows])))
