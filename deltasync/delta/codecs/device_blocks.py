"""The codec `block` on a device: many rows of one dtype at once, in a few launches.

What is made is bit for bit what `codecs.blocks` makes for the same shapes. Blocks of rows lie side
by side, and begin at multiples of 4 bytes. The caller makes the device current.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.codecs import blocks, steps
from deltasync.delta.codecs.blocks import HEADER_BYTES, Shape
from deltasync.delta.kernels import triton_codecs as kernels
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.dtypes import Dtype
from deltasync.errors import InvalidIndices, TruncatedFrame

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """Coded rows.

    Attributes:
        index, value: uint8[n] on the device, the rows' blocks side by side.
        index_bytes, value_bytes: int64[rows], how long each block is.
    """

    index: Tensor
    value: Tensor
    index_bytes: Ints
    value_bytes: Ints


def likely_shape(count: int, span: int) -> Shape:
    """A good shape for a row of which no more is known, with the most that a block can count."""

    def cost(bits: int) -> float:
        mean = count * (1 << bits) / span
        return count * bits + span / (1 << bits) * math.log2(2 + mean + 4 * math.sqrt(mean))

    bits = min(blocks.BLOCK_BITS, key=cost)
    return Shape(bits, bits + 1)


def encode(
    indices: Tensor, new: Tensor, old: Tensor, counts: Ints, spans: Ints, dtype: Dtype
) -> DeviceBlocks:
    """Code rows whose changes lie one after another.

    Waits once for the device, to learn how long the blocks are.

    Args:
        indices: int32[n], those of each row increasing and below its span.
        new, old: int[n], the bits of `dtype` after and before.
        counts, spans: int64[rows], changes of each row, 1 or more, and the elements it covers.
    """
    device = indices.device
    shapes = [likely_shape(*row) for row in zip(counts.tolist(), spans.tolist(), strict=True)]
    tiles = _Tiles.of(counts, kernels.TILE, device)
    each = np.array([shape.num_blocks(span) for shape, span in zip(shapes, spans, strict=True)])
    widths = np.array([shape.block_bits for shape in shapes])
    table = _table([_begins(each), each, widths], device)
    block_counts = torch.zeros(int(each.sum()), dtype=torch.int32, device=device)
    found = torch.zeros(len(counts), dtype=torch.int32, device=device)
    codes = torch.empty_like(indices)
    longer = torch.empty((tiles.number, 2), dtype=torch.int64, device=device)
    changes = tiles.changes
    tiles.launch(kernels.count_blocks, changes, table, indices, block_counts, found)
    tiles.launch(kernels.code_steps, changes, new, old, codes, longer, **_order(dtype))
    begins, totals = tiles.sums(longer)
    most, nibbles, wholes = torch.cat([found[:, None], totals], 1).cpu().numpy().T
    count_widths = np.array([int(one).bit_length() for one in most])
    return _written(
        _Changes(indices, new, old, codes, counts, dtype),
        _Measured(widths, count_widths, block_counts, each, tiles, begins, nibbles, wholes),
    )


@dataclass(frozen=True, slots=True)
class _Changes:
    indices: Tensor
    new: Tensor
    old: Tensor
    codes: Tensor
    counts: Ints
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class _Measured:
    widths: Ints
    count_widths: Ints
    block_counts: Tensor
    num_blocks: Ints
    tiles: _Tiles
    begins: Tensor
    nibbles: Ints
    wholes: Ints


def _written(changes: _Changes, found: _Measured) -> DeviceBlocks:
    """The blocks, now that it is known how long they are."""
    device, dtype, counts = changes.indices.device, changes.dtype, changes.counts
    widths, count_widths = found.widths, found.count_widths
    offsets_at = HEADER_BYTES + _bytes(found.num_blocks, count_widths)
    index_bytes = offsets_at + _bytes(counts, widths)
    nibbles_at = _bytes(counts, blocks.CODE_BITS)
    wholes_at = nibbles_at + _bytes(found.nibbles, blocks.NIBBLE_BITS)
    value_bytes = wholes_at + _bytes(found.wholes, 8 * dtype.item_size)
    index = torch.empty(int(index_bytes.sum()), dtype=torch.uint8, device=device)
    value = torch.zeros(int(value_bytes.sum()), dtype=torch.uint8, device=device)
    index_at = index.data_ptr() + _begins(index_bytes)
    value_at = value.data_ptr() + _begins(value_bytes)
    headers = torch.from_numpy((widths | count_widths << 8).astype(np.int32)).to(device)
    starts = torch.from_numpy(_begins(index_bytes) // 4).to(device)
    index.view(torch.int32)[starts] = headers
    nibbles = torch.empty(int(found.nibbles.sum()), dtype=torch.int32, device=device)
    nibble_from = nibbles.data_ptr() + 4 * _begins(found.nibbles)
    found.tiles.launch(
        kernels.split_steps, found.tiles.changes, changes.new, changes.old, changes.codes,
        found.begins, _table([nibble_from, value_at + wholes_at], device),
        TYPE=TYPES[dtype.item_size], **_order(dtype),
    )  # fmt: skip
    begins, blocks_from = _begins(counts), 4 * _begins(found.num_blocks)
    jobs = [
        (found.block_counts.data_ptr() + blocks_from, found.num_blocks, count_widths,
         index_at + HEADER_BYTES),
        (changes.indices.data_ptr() + 4 * begins, counts, widths, index_at + offsets_at),
        (changes.codes.data_ptr() + 4 * begins, counts, blocks.CODE_BITS, value_at),
        (nibble_from, found.nibbles, blocks.NIBBLE_BITS, value_at + nibbles_at),
    ]  # fmt: skip
    _on_fields(kernels.pack_fields, jobs, device)
    return DeviceBlocks(index, value, index_bytes, value_bytes)


def decode_indices(index: Tensor, index_bytes: Ints, counts: Ints, spans: Ints) -> Tensor:
    """int32[n]: the positions of rows, one row after another.

    Not looked at but for their number: the caller checks that they increase within the span. Waits
    twice for the device.

    Args:
        index: uint8[bytes], the rows' index blocks side by side; it begins at an address that 4
            divides.
        index_bytes, counts, spans: int64[rows].

    Raises:
        WireError: A block is none that the codec makes.
    """
    device, begins = index.device, _begins(index_bytes)
    shapes = _shapes(index, index_bytes)
    widths = np.array([shape.block_bits for shape in shapes])
    count_widths = np.array([shape.count_bits for shape in shapes])
    each = np.array([shape.num_blocks(span) for shape, span in zip(shapes, spans, strict=True)])
    offsets_at = HEADER_BYTES + _bytes(each, count_widths)
    _check_lengths(index_bytes, offsets_at + _bytes(counts, widths))
    block_counts = torch.empty(int(each.sum()), dtype=torch.int32, device=device)
    target = block_counts.data_ptr() + 4 * _begins(each)
    job = (target, each, count_widths, index.data_ptr() + begins + HEADER_BYTES)
    _on_fields(kernels.unpack_fields, [job], device)
    ends = torch.zeros(len(block_counts) + 1, dtype=torch.int64, device=device)
    torch.cumsum(block_counts, 0, out=ends[1:])
    found = ends[torch.from_numpy(np.cumsum(each)).to(device)].cpu().numpy()
    if not np.array_equal(found, np.cumsum(counts)):
        raise InvalidIndices("blocks count other changes than their rows")
    indices = torch.empty(int(counts.sum()), dtype=torch.int32, device=device)
    tiles = _Tiles.of(each, kernels.LOCATED, device)
    offsets_from = index.data_ptr() + begins + offsets_at
    columns = [_begins(each), each, widths, offsets_from, _begins(counts), tiles.firsts]
    tiles.launch(kernels.locate_blocks, _table(columns, device), ends, indices)
    return indices


def decode_values(
    value: Tensor, value_bytes: Ints, counts: Ints, old: Tensor, dtype: Dtype
) -> Tensor:
    """int[n]: the new bits of rows' changes, one row after another.

    Waits once for the device.

    Args:
        value: uint8[bytes], the rows' value blocks side by side; it begins at an address that 4
            divides.
        value_bytes, counts: int64[rows].
        old: int[n], the bits before.
        dtype: Of all rows.

    Raises:
        WireError: A block is none that the codec makes.
    """
    device = value.device
    nibbles_at = _bytes(counts, blocks.CODE_BITS)
    if (value_bytes < nibbles_at).any() or value_bytes.sum() != len(value):
        raise TruncatedFrame("value blocks are shorter than their codes")
    if (value_bytes % 4).any():
        raise TruncatedFrame("a value block does not end with a word")
    tiles = _Tiles.of(counts, kernels.TILE, device)
    value_at = value.data_ptr() + _begins(value_bytes)
    longer = torch.empty((tiles.number, 2), dtype=torch.int64, device=device)
    tiles.launch(kernels.count_codes, tiles.changes, _table([value_at], device), longer)
    begins, totals = tiles.sums(longer)
    nibbles, wholes = totals.cpu().numpy().T
    wholes_at = nibbles_at + _bytes(nibbles, blocks.NIBBLE_BITS)
    _check_lengths(value_bytes, wholes_at + _bytes(wholes, 8 * dtype.item_size))
    new = torch.empty_like(old)
    table = _table([value_at, value_at + nibbles_at, value_at + wholes_at], device)
    tiles.launch(
        kernels.decode_steps, tiles.changes, table, begins, old, new,
        TYPE=TYPES[dtype.item_size], **_order(dtype),
    )  # fmt: skip
    return new


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Which part of which row each program works on."""

    number: int
    firsts: Ints
    row: Tensor
    first: Tensor
    last: Tensor
    changes: Tensor
    size: int

    @classmethod
    def of(cls, counts: Ints, size: int, device: torch.device) -> _Tiles:
        each = -(-counts // size)
        firsts, row = _begins(each), np.repeat(np.arange(len(counts)), each)
        first, last = (torch.from_numpy(at).to(device) for at in (firsts, firsts + each))
        changes = _table([_begins(counts), counts, firsts], device)
        return cls(len(row), firsts, torch.from_numpy(row).to(device), first, last, changes, size)

    def launch(self, kernel: Any, table: Tensor, *arguments: Any, **constants: Any) -> None:
        """A program for each tile."""
        if self.number:
            rows = len(self.firsts)
            kernel[(self.number,)](table, self.row, *arguments, rows, **constants, TILE=self.size)

    def sums(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """int64[tiles, 2] and int64[rows, 2]: sums of a row before each tile, and over each row."""
        ends = torch.zeros((self.number + 1, 2), dtype=torch.int64, device=counts.device)
        torch.cumsum(counts, 0, out=ends[1:])
        begins = ends[self.first]
        return ends[:-1] - begins[self.row], ends[self.last] - begins


def _on_fields(kernel: Any, jobs: Sequence[tuple[Any, Ints, Any, Any]], device: Any) -> None:
    """Launch over jobs: addresses of numbers, how many, their width, addresses of words."""
    counts = np.concatenate([job[1] for job in jobs])
    tiles = _Tiles.of(counts, kernels.TILE, device)
    columns = [
        np.concatenate([np.broadcast_to(job[place], job[1].shape) for job in jobs])
        for place in range(4)
    ]
    tiles.launch(kernel, _table([*columns, tiles.firsts], device))


def _shapes(index: Tensor, index_bytes: Ints) -> list[Shape]:
    """The widths that index blocks declare. Raises WireError."""
    if (index_bytes < HEADER_BYTES).any() or index_bytes.sum() != len(index):
        raise TruncatedFrame("index blocks are shorter than their headers")
    if (index_bytes % 4).any():
        raise TruncatedFrame("an index block does not end with a word")
    starts = torch.from_numpy(_begins(index_bytes) // 4).to(index.device)
    headers = index.view(torch.int32)[starts].cpu().numpy().astype("<i4")
    return [blocks.read_shape(header) for header in headers.view(np.uint8).reshape(-1, 4)]


def _check_lengths(given: Ints, wanted: Ints) -> None:
    wrong = np.flatnonzero(given != wanted)
    if len(wrong):
        row = wrong[0]
        raise TruncatedFrame(f"row {row} takes {wanted[row]} bytes; {given[row]} came")


def _order(dtype: Dtype) -> dict[str, Any]:
    """How a kernel puts the bits of `dtype` into order."""
    bits = 8 * dtype.item_size
    sign = kernels.INTEGER_SIGN if steps.is_signed(dtype) else kernels.NO_SIGN
    order = kernels.FLOAT_SIGN if steps.has_sign(dtype) else sign
    return {"MASK": (1 << bits) - 1, "SIGN": 1 << bits - 1, "ORDER": order}


def _bytes(counts: Ints, widths: Any) -> Ints:
    """`field_bytes` of many."""
    words: Ints = -(-counts * widths // 32)
    return words * 4


def _begins(counts: Ints) -> Ints:
    return np.cumsum(counts) - counts


def _table(columns: Sequence[Ints], device: torch.device) -> Tensor:
    """int64[columns, rows]."""
    return torch.from_numpy(np.stack(columns).astype(np.int64)).to(device)
