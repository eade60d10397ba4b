"""Rows that the Triton kernels of `block` code and decode, checked against numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import INTEGERS
from deltasync.delta.codecs import blocks
from deltasync.delta.codecs.base import Bits, SparseRow
from deltasync.delta.codecs.blocks import Shape
from deltasync.delta.codecs.device_base import Checks, DeviceBlocks, DeviceRows, Ints
from deltasync.delta.codecs.device_blocks import (
    encode_rows,
    likely_bits,
    read_indices,
    read_values,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placed(bits: Bits) -> Tensor:
    """int[n]: unsigned[n] bits on the device."""
    own = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
    return torch.from_numpy(own.copy()).view(INTEGERS[bits.itemsize]).to(DEVICE)


def joined(parts: list[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(DEVICE)


def rows_of(rows: list[SparseRow]) -> DeviceRows:
    counts, spans = zip(*((len(row.indices), row.span) for row in rows), strict=True)
    return DeviceRows(np.array(counts), np.array(spans), rows[0].dtype)


def encoded(rows: list[SparseRow]) -> DeviceBlocks:
    return encode_rows(
        rows_of(rows),
        joined([row.indices for row in rows]),
        placed(np.concatenate([row.new for row in rows])),
        placed(np.concatenate([row.old for row in rows])),
    )


def decoded_indices(rows: DeviceRows, index: Tensor, index_bytes: Ints) -> Tensor:
    """Once all checks are done."""
    checks = Checks()
    found = read_indices(rows, index, index_bytes, checks)
    checks.finish()
    return found


def decoded_values(rows: DeviceRows, value: Tensor, value_bytes: Ints, old: Tensor) -> Tensor:
    """Once all checks are done."""
    checks = Checks()
    found = read_values(rows, value, value_bytes, old, checks)
    checks.finish()
    return found


def index_block(row: SparseRow) -> bytes:
    """What numpy makes, in the shape that the device chooses."""
    [bits] = likely_bits(np.array([len(row.indices)]), np.array([row.span])).tolist()
    most = int(np.bincount(row.indices >> bits).max())
    return blocks.encode_indices(row.indices, Shape(bits, most.bit_length()), row.span)


def check(rows: list[SparseRow]) -> None:
    """Blocks are those of numpy, and rows come back."""
    made, these = encoded(rows), rows_of(rows)
    assert bytes(made.index.tolist()) == b"".join(map(index_block, rows))
    values = [blocks.encode_values(row.new, row.old, row.dtype) for row in rows]
    assert bytes(made.value.tolist()) == b"".join(values)
    assert made.value_bytes.tolist() == list(map(len, values))
    found = decoded_indices(these, made.index, made.index_bytes)
    assert torch.equal(found, joined([row.indices for row in rows]))
    old = placed(np.concatenate([row.old for row in rows]))
    new = decoded_values(these, made.value, made.value_bytes, old)
    assert torch.equal(new, placed(np.concatenate([row.new for row in rows])))
