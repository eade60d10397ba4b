"""What a device chooses for rows of `class`: their classes, parameters and frequent steps.

Any choice can be decoded. These come from samples of each row, for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import upload
from deltasync.delta.codecs import class_frequent, class_positions, class_values
from deltasync.delta.codecs.bitstream import MAX_WIDTH
from deltasync.delta.codecs.class_keys import MAX_CLASSES
from deltasync.delta.codecs.device_base import Ints
from deltasync.delta.codecs.device_blocks import order_constants
from deltasync.delta.codecs.device_class_lines import key_constants
from deltasync.delta.codecs.device_class_tiles import numbered
from deltasync.delta.codecs.device_tiles import begins_of
from deltasync.delta.kernels import triton_class_choices, triton_class_moves, triton_classes
from deltasync.delta.kernels.triton_base import TYPES
from deltasync.dtypes import Dtype

_PIECE = 1024
"""Elements that are looked at together."""

_MOST_PIECES = 64
"""Pieces of a row that are looked at."""

_LEAST_BINS = 32
"""A histogram has no fewer."""

_NEVER = 1e6
"""Bits of a length with a parameter that must not be."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What is chosen for each row.

    Attributes:
        index, value: uint8[rows, keys], the classes of keys in both blocks.
        num_index, num_value: int64[rows], how many classes there are.
        parameters: int64[rows, 64], of the classes of the value block.
        listed: int64[rows, 64], frequent steps; num_listed: int64[rows], how many.
    """

    index: Tensor
    num_index: Tensor
    value: Tensor
    num_value: Tensor
    parameters: Tensor
    listed: Tensor
    num_listed: Tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of rows, one row after another.

    Attributes:
        new, old: int[n], the bits after and before.
        counts: int64[rows], changes of each row.
    """

    new: Tensor
    old: Tensor
    counts: Ints
    dtype: Dtype

    @property
    def addresses(self) -> Ints:
        """int64[rows], where the old bits of each row begin."""
        return self.old.data_ptr() + begins_of(self.counts) * self.dtype.item_size


def choose(changes: Changes, addresses: Ints, spans: Ints) -> Choices:
    """Choose for rows of so many elements, whose old bits begin at these addresses."""
    device, dtype, counts = changes.old.device, changes.dtype, changes.counts
    chosen = _keys(changes.addresses, counts, dtype, device)
    found = torch.maximum(_keys(addresses, spans, dtype, device), chosen)
    windows = _windows(found)
    listed, num_listed = _frequent(changes)
    few, many = _before(chosen, windows), _before(found, windows)
    lanes = -(-spans // (1 << class_positions.LANE_BITS))
    none = torch.zeros((len(spans), MAX_CLASSES + 1, 1), dtype=torch.float64, device=device)
    index = _divided(
        few, many, none, windows, upload([lanes], device)[0], dtype, class_positions.COST_OF_CLASS
    )
    lengths = _lengths(changes, listed, num_listed, windows)
    costs = _sums(lengths @ _rice_costs(dtype, device))
    longer, all_of = _sums(lengths[:, :, 1:].sum(2)), _sums(lengths.sum(2))
    no_lanes = torch.zeros_like(windows)
    value = _divided(longer, all_of, costs, windows, no_lanes, dtype, class_values.COST_OF_CLASS)
    return Choices(*index[:2], *value, listed, num_listed)


def _divided(
    few: Tensor, many: Tensor, costs: Tensor, windows: Tensor, lanes: Tensor, dtype: Dtype,
    cost: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Classes of keys, how many, and their parameters: see `choose_classes`."""
    rows, device = len(windows), windows.device
    keys = key_constants(dtype)["KEYS"]
    classes = torch.empty((rows, keys), dtype=torch.uint8, device=device)
    number = torch.empty(rows, dtype=torch.int64, device=device)
    parameters = torch.zeros((rows, MAX_CLASSES), dtype=torch.int64, device=device)
    triton_class_choices.choose_classes[(rows,)](
        few, many, costs, windows, lanes, classes, number, parameters,
        COST=cost, KEYS=keys, PARAMETERS=costs.shape[2],
    )  # fmt: skip
    return classes, number, parameters


def _pieces(starts: Ints, lengths: Ints, device: torch.device) -> tuple[Tensor, Tensor, Ints]:
    """What kernels look at: a table, the row of each piece, and how many elements of each row."""
    each = np.minimum(-(-lengths // _PIECE), _MOST_PIECES)
    is_whole = lengths <= _PIECE * _MOST_PIECES
    apart = np.where(is_whole, _PIECE, lengths // np.maximum(each, 1))
    columns = [starts, lengths, apart, begins_of(each)]
    seen = np.where(is_whole, lengths, _PIECE * each)
    table, there = upload([np.stack(columns), each], device)
    return table, numbered(each, there), seen


def _keys(addresses: Ints, lengths: Ints, dtype: Dtype, device: torch.device) -> Tensor:
    """float64[rows, keys]: about how many elements of lines have each key."""
    pieces, rows, seen = _pieces(addresses, lengths, device)
    constants = key_constants(dtype)
    found = torch.zeros((len(lengths), constants["KEYS"]), dtype=torch.int32, device=device)
    triton_classes.count_keys[(len(rows),)](
        pieces, rows, found, len(lengths), **constants,
        BINS=max(_LEAST_BINS, constants["KEYS"]), TYPE=TYPES[dtype.item_size], TILE=_PIECE,
    )  # fmt: skip
    return found.double() * _scale(lengths, seen, device)[:, None]


def _lengths(changes: Changes, listed: Tensor, num_listed: Tensor, windows: Tensor) -> Tensor:
    """float64[rows, 64, 64]: about how many moves have each length: see `count_lengths`."""
    device, counts = windows.device, changes.counts
    pieces, rows, seen = _pieces(begins_of(counts), counts, device)
    shape = len(counts), MAX_CLASSES, 64
    found = torch.zeros(shape, dtype=torch.int32, device=device)
    triton_class_moves.count_lengths[(len(rows),)](
        pieces, rows, changes.new, changes.old, listed, num_listed, windows, found, len(counts),
        **key_constants(changes.dtype), **order_constants(changes.dtype), TILE=_PIECE,
    )  # fmt: skip
    return found.double() * _scale(counts, seen, device)[:, None, None]


def _scale(lengths: Ints, seen: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(lengths / np.maximum(seen, 1)).to(device)


def _windows(found: Tensor) -> Tensor:
    """int64[rows]: the first key that is told apart: see `class_keys.window`."""
    keys = torch.arange(found.shape[1], device=found.device)
    is_used = found > 0
    first = torch.where(is_used, keys, found.shape[1]).amin(1)
    last = torch.where(is_used, keys, 0).amax(1)
    return torch.maximum(first, last + 1 - MAX_CLASSES)


def _before(found: Tensor, windows: Tensor) -> Tensor:
    """float64[rows, 65]: sums over what lies before each key of the window, and behind it."""
    sums = torch.nn.functional.pad(found.cumsum(1), (1, 0))
    places = windows[:, None] + torch.arange(MAX_CLASSES + 1, device=found.device)
    within = sums.gather(1, places.clamp(max=found.shape[1]))
    within[:, 0] = 0
    return within.contiguous()


def _sums(found: Tensor) -> Tensor:
    """float64[rows, 65, ...]: sums over what lies before each place of [rows, 64, ...]."""
    sums = found.new_zeros((len(found), MAX_CLASSES + 1, *found.shape[2:]))
    torch.cumsum(found, 1, out=sums[:, 1:])
    return sums


def _rice_costs(dtype: Dtype, device: torch.device) -> Tensor:
    """float64[64, 64]: bits of a length of each kind of `count_lengths`, by parameter."""
    bits = np.arange(64.0) - 1
    excess = np.where(bits < 2, np.maximum(bits, 0), 0.72 * 2**bits)[:, None]
    parameter = np.arange(64.0)[None, :]
    over = excess / 2**parameter
    escaped = class_values.ESCAPE + 1 + 8 * dtype.item_size
    costs = np.where(over < class_values.ESCAPE, over + 1 + parameter, escaped)
    costs[:, MAX_WIDTH + 1 :] = _NEVER
    costs[0] = 0
    return torch.from_numpy(costs).to(device)


def _frequent(changes: Changes) -> tuple[Tensor, Tensor]:
    """Frequent steps of each row, int64[rows, 64], and how many: those of `Frequent.of`.

    Waits for the device, unless elements are floats or wide.
    """
    dtype, rows, device = changes.dtype, len(changes.counts), changes.old.device
    listed = torch.zeros((rows, class_frequent.MOST), dtype=torch.int64, device=device)
    number = torch.zeros(rows, dtype=torch.int64, device=device)
    if not class_frequent.can_list(dtype):
        return listed, number
    [each] = upload([changes.counts], device)
    keys = (numbered(changes.counts, each) << 32) | _zigzag(changes)
    keys, counts = torch.unique(keys, return_counts=True)
    row = keys >> 32
    order = torch.argsort((row << 32) - counts, stable=True)
    keys, counts, row = keys[order], counts[order], row[order]
    first = torch.searchsorted(row, torch.arange(rows, device=device))
    place = torch.arange(len(row), device=device) - first[row]
    is_listed = (place < class_frequent.MOST) & (counts >= class_frequent.LEAST_OFTEN)
    row, place = row[is_listed], place[is_listed]
    listed[row, place] = keys[is_listed] & 0xFFFFFFFF
    return listed, number.index_add_(0, row, torch.ones_like(row))


def _zigzag(changes: Changes) -> Tensor:
    """int64[n]: the zigzag steps of integers of up to 4 bytes."""
    bits = 8 * changes.dtype.item_size
    step = (changes.new.long() - changes.old.long()) & ((1 << bits) - 1)
    is_negative = step >> (bits - 1)
    return ((step << 1) ^ -is_negative) & ((1 << bits) - 1)
