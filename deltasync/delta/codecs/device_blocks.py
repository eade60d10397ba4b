"""The codec `block` on a device: many rows of one dtype at once, in a few launches.

What is made is bit for bit what `codecs.blocks` makes for the same shapes. Blocks of rows lie side
by side, and begin at multiples of 4 bytes. Kernels run on the current stream of the current device,
which the caller has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import Numbers, upload
from deltasync.delta.codecs import blocks, steps
from deltasync.delta.codecs.blocks import HEADER_BYTES
from deltasync.delta.codecs.device_base import Checks, DeviceBlocks, DeviceRows, Ints
from deltasync.delta.codecs.device_tiles import Tiles, add_up, begins_of
from deltasync.delta.kernels import triton_codecs as kernels
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.dtypes import Dtype
from deltasync.errors import InvalidIndices, TruncatedFrame


def encode_rows(rows: DeviceRows, indices: Tensor, new: Tensor, old: Tensor) -> DeviceBlocks:
    """The blocks of rows, and how long they are. Waits once for the device.

    They may have any length: whoever calls sends a row raw if that pays.

    Args:
        rows: What the others are of.
        indices: int32[n], those of each row increasing and below its span.
        new, old: int[n], the bits after and before at the indices.
    """
    measured = _measured(rows, indices, new, old)
    return _written(rows, indices, new, old, measured)


def read_indices(rows: DeviceRows, index: Tensor, index_bytes: Ints, checks: Checks) -> Tensor:
    """int32[n]: the indices of rows, one row after another. Waits once for the device.

    The caller checks that they increase within the span, when `checks` are finished.

    Args:
        rows: How many there are is at most what the payload has room for.
        index: uint8[bytes], the rows' index blocks side by side: arbitrary bytes. It begins at an
            address that 16 divides.
        index_bytes: int64[rows], how long each block is.
        checks: Where to put off what it takes the device to know.

    Raises:
        WireError: A block is not what `encode_rows` makes of any row. Now, or in `checks`.
    """
    counts, spans, begins = rows.counts, rows.spans, begins_of(index_bytes)
    widths, count_widths = _shapes(index, index_bytes)
    each = _num_blocks(spans, widths)
    offsets_at = HEADER_BYTES + _bytes(each, count_widths)
    _check_lengths(index_bytes, offsets_at + _bytes(counts, widths))
    at = index.data_ptr() + begins
    tiles = Tiles.of(each, kernels.LOCATED)
    columns = [
        at + HEADER_BYTES,
        each,
        count_widths,
        at + offsets_at,
        widths,
        begins_of(counts),
    ]
    table, row = tiles.placed([*columns, counts], index.device)
    ends = tiles.ends(1, index.device)
    tiles.launch(kernels.count_located, table, row, ends)
    add_up(ends.T)
    checks.add(ends, lambda found: _check_counts(tiles.totals(found, 1)[:, 0], counts))
    indices = torch.zeros(int(counts.sum()), dtype=torch.int32, device=index.device)
    tiles.launch(kernels.locate_blocks, table, row, ends, indices)
    return indices


def read_values(
    rows: DeviceRows, value: Tensor, value_bytes: Ints, old: Tensor, checks: Checks
) -> Tensor:
    """int[n]: the new bits of rows' changes, one row after another. Does not wait.

    Args:
        rows: As those of `read_indices`.
        value: uint8[bytes], the rows' value blocks side by side, likewise.
        value_bytes: int64[rows].
        old: int[n], the bits before at the indices.
        checks: Where to put off what it takes the device to know.

    Raises:
        WireError: A block is not what `encode_rows` makes of any row. Now, or in `checks`.
    """
    counts, dtype = rows.counts, rows.dtype
    nibbles_at = _bytes(counts, blocks.CODE_BITS)
    _check_blocks(value, value_bytes, nibbles_at, "a value block is shorter than its codes")
    at = value.data_ptr() + begins_of(value_bytes)
    tiles = Tiles.of(counts, kernels.TILE)
    table, row = tiles.placed([begins_of(counts), counts, at, nibbles_at, value_bytes], old.device)
    ends = tiles.ends(2, old.device)
    tiles.launch(kernels.count_codes, table, row, ends)
    add_up(ends.T)

    def look(found: Ints) -> None:
        nibbles, wholes = tiles.totals(found, 2).T
        wholes_at = nibbles_at + _bytes(nibbles, blocks.NIBBLE_BITS)
        _check_lengths(value_bytes, wholes_at + _bytes(wholes, 8 * dtype.item_size))

    checks.add(ends, look)
    new = torch.empty_like(old)
    tiles.launch(
        kernels.decode_steps, table, row, ends, old, new,
        TYPE=TYPES[dtype.item_size], **order_constants(dtype),
    )  # fmt: skip
    return new


def likely_bits(counts: Ints, spans: Ints) -> Ints:
    """int64[rows]: good `Shape.block_bits` for rows of which no more is known."""
    bits = np.array(blocks.BLOCK_BITS)[:, None]
    mean = counts * 2.0**bits / spans
    most = np.log2(2 + mean + 4 * np.sqrt(mean))
    found: Ints = blocks.BLOCK_BITS[0] + (counts * bits + spans / 2.0**bits * most).argmin(axis=0)
    return found


@dataclass(frozen=True, slots=True)
class _Measured:
    """What is known of rows before their blocks are written.

    Attributes:
        widths, count_widths, num_blocks: int64[rows], of an offset and of a count, and blocks.
        block_counts: int32[blocks] on the device, the changes of each.
        codes: int32[n] on the device, the code of each change.
        tiles: Of changes; `table` and `row` say on the device where they are.
        ends: int64[tiles + 1, 2] on the device: nibbles and whole values up to each tile.
        nibbles, wholes: int64[rows].
    """

    widths: Ints
    count_widths: Ints
    num_blocks: Ints
    block_counts: Tensor
    codes: Tensor
    tiles: Tiles
    table: Tensor
    row: Tensor
    ends: Tensor
    nibbles: Ints
    wholes: Ints


def _measured(rows: DeviceRows, indices: Tensor, new: Tensor, old: Tensor) -> _Measured:
    """Waits once for the device."""
    device, widths = indices.device, likely_bits(rows.counts, rows.spans)
    each = _num_blocks(rows.spans, widths)
    tiles = Tiles.of(rows.counts, kernels.TILE)
    table, row = tiles.placed(
        [begins_of(rows.counts), rows.counts, begins_of(each), widths], device
    )
    block_counts = torch.zeros(int(each.sum()), dtype=torch.int32, device=device)
    most = torch.zeros(len(each), dtype=torch.int64, device=device)
    codes, ends = torch.empty_like(indices), tiles.ends(2, device)
    tiles.launch(kernels.count_blocks, table, row, indices, block_counts, most)
    tiles.launch(
        kernels.code_steps, table, row, new, old, codes, ends, **order_constants(rows.dtype)
    )
    add_up(ends.T)
    found = Numbers(torch.cat([most, ends.view(-1)])).read()
    nibbles, wholes = tiles.totals(found[len(each) :], 2).T
    count_widths = np.frexp(found[: len(each)])[1].astype(np.int64)  # bit lengths
    return _Measured(
        widths, count_widths, each, block_counts, codes, tiles, table, row, ends, nibbles, wholes
    )


def _written(
    rows: DeviceRows, indices: Tensor, new: Tensor, old: Tensor, found: _Measured
) -> DeviceBlocks:
    """The blocks, now that it is known how long they are."""
    device, dtype, counts = indices.device, rows.dtype, rows.counts
    widths, count_widths = found.widths, found.count_widths
    offsets_at = HEADER_BYTES + _bytes(found.num_blocks, count_widths)
    index_bytes = offsets_at + _bytes(counts, widths)
    nibbles_at = _bytes(counts, blocks.CODE_BITS)
    wholes_at = nibbles_at + _bytes(found.nibbles, blocks.NIBBLE_BITS)
    value_bytes = wholes_at + _bytes(found.wholes, 8 * dtype.item_size)
    index = torch.empty(int(index_bytes.sum()), dtype=torch.uint8, device=device)
    value = torch.zeros(int(value_bytes.sum()), dtype=torch.uint8, device=device)
    index_at = index.data_ptr() + begins_of(index_bytes)
    value_at = value.data_ptr() + begins_of(value_bytes)
    nibbles = torch.empty(int(found.nibbles.sum()), dtype=torch.int32, device=device)
    nibble_from = nibbles.data_ptr() + 4 * begins_of(found.nibbles)
    starts, headers, targets = upload(
        [
            begins_of(index_bytes) // 4,
            widths | count_widths << 8,
            np.stack([nibble_from, value_at + wholes_at]),
        ],
        device,
    )
    index.view(torch.int32)[starts] = headers.to(torch.int32)
    found.tiles.launch(
        kernels.split_steps, found.table, found.row, new, old, found.codes, found.ends, targets,
        TYPE=TYPES[dtype.item_size], **order_constants(dtype),
    )  # fmt: skip
    begins, blocks_from = begins_of(counts), 4 * begins_of(found.num_blocks)
    jobs = [
        (found.block_counts.data_ptr() + blocks_from, found.num_blocks, count_widths,
         index_at + HEADER_BYTES),
        (indices.data_ptr() + 4 * begins, counts, widths, index_at + offsets_at),
        (found.codes.data_ptr() + 4 * begins, counts, blocks.CODE_BITS, value_at),
        (nibble_from, found.nibbles, blocks.NIBBLE_BITS, value_at + nibbles_at),
    ]  # fmt: skip
    _pack(jobs, device)
    return DeviceBlocks(index, value, index_bytes, value_bytes)


def _pack(jobs: Sequence[tuple[Any, Ints, Any, Any]], device: torch.device) -> None:
    """Pack fields: addresses of numbers, how many, their width, addresses of words."""
    tiles = Tiles.of(np.concatenate([job[1] for job in jobs]), kernels.TILE)
    columns = [
        np.concatenate([np.broadcast_to(job[place], job[1].shape) for job in jobs])
        for place in range(4)
    ]
    tiles.launch(kernels.pack_fields, *tiles.placed(columns, device))


def _shapes(index: Tensor, index_bytes: Ints) -> tuple[Ints, Ints]:
    """int64[rows] each: widths of offsets and counts that index blocks declare.

    Waits once for the device. Raises WireError.
    """
    _check_blocks(index, index_bytes, HEADER_BYTES, "an index block is shorter than its header")
    (starts,) = upload([begins_of(index_bytes) // 4], index.device)
    headers = Numbers(index.view(torch.int32)[starts]).read().astype("<i4")
    parts = headers.view(np.uint8).reshape(-1, 4).astype(np.int64)
    bits, count_bits = parts[:, 0], parts[:, 1]
    is_good = (bits >= blocks.BLOCK_BITS[0]) & (bits <= blocks.BLOCK_BITS[-1])
    is_good &= (count_bits >= 1) & (count_bits <= bits + 1) & ~parts[:, 2:].any(axis=1)
    if not is_good.all():
        blocks.read_shape(headers.view(np.uint8).reshape(-1, 4)[np.argmin(is_good)])
    return bits, count_bits


def _check_blocks(data: Tensor, lengths: Ints, least: Any, problem: str) -> None:
    """Raises TruncatedFrame unless blocks side by side are words, and have so many bytes each."""
    if (lengths < least).any() or lengths.sum() != len(data):
        raise TruncatedFrame(problem)
    if (lengths % 4).any():
        raise TruncatedFrame("a block does not end with a word")


def _check_lengths(given: Ints, wanted: Ints) -> None:
    wrong = np.flatnonzero(given != wanted)
    if len(wrong):
        row = wrong[0]
        raise TruncatedFrame(f"row {row} takes {wanted[row]} bytes; {given[row]} came")


def _check_counts(found: Ints, counts: Ints) -> None:
    if not np.array_equal(found, counts):
        raise InvalidIndices("blocks count other changes than their rows")


def order_constants(dtype: Dtype) -> dict[str, Any]:
    """How a kernel puts the bits of `dtype` into order."""
    bits = 8 * dtype.item_size
    sign = kernels.INTEGER_SIGN if steps.is_signed(dtype) else kernels.NO_SIGN
    order = kernels.FLOAT_SIGN if steps.has_sign(dtype) else sign
    return {"MASK": (1 << bits) - 1, "SIGN": 1 << bits - 1, "ORDER": order}


def _num_blocks(spans: Ints, widths: Ints) -> Ints:
    """int64[rows]: `Shape.num_blocks` of many."""
    return -(-spans >> widths)


def _bytes(counts: Ints, widths: Any) -> Ints:
    """`field_bytes` of many."""
    words: Ints = -(-counts * widths // 32)
    return words * 4
