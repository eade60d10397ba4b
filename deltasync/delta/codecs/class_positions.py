"""The index block of `class`: which elements of a row changed, by the exponents of the old ones.

A row is cut into *lanes*. In each lane elements are ordered by class, then by position; what
changed in a class of a lane is a subset, written as `subsets` does. Lanes need nothing of one
another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.codecs import class_keys
from deltasync.delta.codecs.base import Bits, Block, Indices
from deltasync.delta.codecs.bitstream import (
    ByteReader,
    Bytes,
    FieldReader,
    Ints,
    UnaryReader,
    pack_fields,
    pack_unary,
    varints,
)
from deltasync.delta.codecs.subsets import Segments
from deltasync.dtypes import Dtype
from deltasync.errors import InvalidIndices, InvalidTable

LANE_BITS = 18
"""Elements of a lane, as a power of two: much larger ones take long to sort."""

COST_OF_CLASS = 24.0
"""Bits that a class takes in the header, about."""

_LANE_BITS = range(10, 21)  # that a block may have
_SAMPLE = 1 << 17  # elements whose keys are counted to choose classes
_GROUP = 1 << 22  # elements that are decoded at once

Order = NDArray[np.uint32]


def encode(
    indices: Indices,
    old: Bits,
    dtype: Dtype,
    lane_bits: int = LANE_BITS,
    firsts: list[int] | None = None,
) -> bytes:
    """The block of int32[n] increasing positions in a row of which `old` are all bits before.

    `firsts` are the first keys of classes; None for those that make the block short.
    """
    lane = 1 << lane_bits
    if firsts is None:
        firsts = _fit(indices, old, dtype, -(-len(old) // lane))
    table, lanes = class_keys.table(firsts, dtype), range(0, len(old), lane)
    cuts = np.searchsorted(indices, [*lanes, len(old)])
    changed, sizes, counts, places = np.zeros(lane, np.bool_), [], [], []
    for begin, low, high in zip(lanes, cuts[:-1], cuts[1:], strict=True):
        order, ends = _sorted(old[begin : begin + lane], dtype, table, len(firsts))
        inside = indices[low:high] - np.int32(begin)
        changed[inside] = True
        found = np.flatnonzero(changed.take(order))
        changed[inside] = False
        sizes.append(np.diff(ends, prepend=0))
        counts.append(np.diff(np.searchsorted(found, ends), prepend=0))
        places.append(found + begin)
    segments = Segments.of(np.concatenate(sizes), np.concatenate(counts).astype(np.int64))
    quotients, remainders, widths = segments.coded(np.concatenate(places))
    header = varints(lane_bits) + class_keys.write_firsts(firsts)
    unary = pack_unary(quotients)
    header += _counts(np.stack(counts)) + varints(len(unary))
    return header + unary + pack_fields(remainders, widths)


def decode(block: Block, count: int, old: Bits, dtype: Dtype) -> Indices:
    """int32[count]: the positions. Raises WireError for a block that `encode` cannot have made."""
    reader = ByteReader(block)
    lane_bits = reader.varint()
    if lane_bits not in _LANE_BITS:
        raise InvalidTable(f"lanes of 2^{lane_bits} elements; 2^10 to 2^20 are known")
    lane = 1 << lane_bits
    firsts = class_keys.read_firsts(reader, dtype)
    counts = _read_counts(reader, -(-len(old) // lane), len(firsts), lane)
    if (total := int(counts.sum())) != count:
        raise InvalidIndices(f"{total} positions in a row of {count}")
    unary = UnaryReader(reader.take(reader.varint()))
    fields = FieldReader(reader.rest())
    table, indices, at = class_keys.table(firsts, dtype), np.empty(count, np.int32), 0
    for begin in range(0, len(old), max(lane, _GROUP)):
        part = old[begin : begin + max(lane, _GROUP)]
        order, sizes = _sorted_lanes(part, lane, dtype, table, len(firsts))
        chosen = counts[begin >> lane_bits :][: len(sizes)]
        places = Segments.of(sizes.ravel(), chosen.ravel()).decoded(unary, fields)
        found = order[places].astype(np.int32)
        found.sort()
        indices[at : at + len(found)] = found + np.int32(begin)
        at += len(found)
    unary.finish()
    fields.finish()
    return indices


def _sorted(
    old: Bits, dtype: Dtype, table: Bytes, num_classes: int
) -> tuple[NDArray[np.int64], Ints]:
    """The positions of a lane by class and position, and where in that order each class ends."""
    classes = table.take(class_keys.keys(old, dtype))
    order = np.argsort(classes, kind="stable")
    return order, np.searchsorted(classes.take(order), np.arange(num_classes), side="right")


def _sorted_lanes(
    old: Bits, lane: int, dtype: Dtype, table: Bytes, num_classes: int
) -> tuple[Order, Ints]:
    """uint32[elements] and int64[lanes, classes]: the order of several lanes, and class sizes."""
    order, sizes = np.empty(len(old), np.uint32), []
    for begin in range(0, len(old), lane):
        one, ends = _sorted(old[begin : begin + lane], dtype, table, num_classes)
        np.add(one, begin, out=order[begin : begin + lane], casting="unsafe")
        sizes.append(np.diff(ends, prepend=0))
    return order, np.stack(sizes)


def _counts(counts: Ints) -> bytes:
    """Of int64[lanes, classes]: for each class the least and a width, then what is above it."""
    least = counts.min(0)
    widths = np.array([int(most).bit_length() for most in counts.max(0) - least])
    header = varints(*np.stack([least, widths], 1).ravel().tolist())
    above = (counts - least).T.astype(np.uint64)
    return header + pack_fields(above.ravel(), np.repeat(widths, len(counts)))


def _read_counts(reader: ByteReader, lanes: int, num_classes: int, lane: int) -> Ints:
    """int64[lanes, classes]: what `_counts` wrote. Raises WireError."""
    numbers = [(reader.varint(), reader.varint()) for _ in range(num_classes)]
    if any(least > lane or width > lane.bit_length() for least, width in numbers):
        raise InvalidTable(f"more changes in a class of a lane than its {lane} elements")
    each = np.array([width for _, width in numbers], np.int64)
    data = reader.take((int(each.sum()) * lanes + 7) // 8)
    above = FieldReader(data).take(np.repeat(each, lanes)).reshape(num_classes, lanes)
    return above.T.astype(np.int64) + np.array([least for least, _ in numbers], np.int64)


def _fit(indices: Indices, old: Bits, dtype: Dtype, lanes: int) -> list[int]:
    """The first keys of the classes that make the block short."""
    step = -(-len(old) // _SAMPLE)
    number = class_keys.num_keys(dtype)
    chosen = np.bincount(class_keys.keys(old[indices], dtype), minlength=number)
    sample = np.bincount(class_keys.keys(old[::step], dtype), minlength=number) * step
    found = np.maximum(sample, chosen)
    begin, end = class_keys.window(found)
    chosen[begin], found[begin] = chosen[: begin + 1].sum(), found[: begin + 1].sum()
    few = class_keys.spans(chosen[begin:end].astype(np.float64))
    many = class_keys.spans(found[begin:end].astype(np.float64))
    per_lane = np.log2(1 + 4 * np.sqrt(np.maximum(np.minimum(few, many - few), 0) / lanes))
    cost = class_keys.entropy(few, many) + COST_OF_CLASS + lanes * per_lane
    firsts = class_keys.divide(cost)
    return [0] + [first + begin for first in firsts[1:]]
