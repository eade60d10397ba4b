"""The index block of `class`: which elements of a row changed, by the exponents of the old ones.

A row is cut into *lanes*. In each lane elements are ordered by class, then by position; what
changed in a class of a lane is a subset, written as `subsets` does. Lanes need nothing of one
another.
"""

from __future__ import annotations

import numpy as np

from deltasync.dtypes import Dtype
from deltasync.errors import InvalidIndices, InvalidTable
from deltasync.files.classes import keys as class_keys
from deltasync.files.classes.bitstream import Bits, Bytes, FieldReader, Indices, Ints, pack_fields
from deltasync.files.classes.order import orders
from deltasync.files.classes.streams import ByteReader, UnaryReader, pack_unary, varints
from deltasync.files.classes.subsets import Segments

LANE_BITS = 18
"""Elements of a lane, as a power of two: the bits of their classes stay in a cache."""

COST_OF_CLASS = 24.0
"""Bits that a class takes in the header, about."""

_LANE_BITS = range(10, 21)  # that a block may have
_SAMPLE = 1 << 17  # elements whose keys are counted to choose classes


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
    sizes, counts, places, at = [], [], [], 0
    for begin, order in orders(old, dtype, lane, firsts):
        size = int(order.sizes.sum())
        low, at = at, at + int(np.searchsorted(indices[at : at + size], begin + size))
        found, chosen = order.places(indices[low:at] - np.int32(begin))
        sizes.append(order.sizes)
        counts.append(chosen)
        places.append(found + begin)
    all_counts = np.concatenate(counts)
    segments = Segments.of(np.concatenate(sizes).ravel(), all_counts.ravel())
    quotients, remainders, widths = segments.coded(np.concatenate(places))
    header = varints(lane_bits) + class_keys.write_firsts(firsts)
    unary = pack_unary(quotients)
    header += _counts(all_counts) + varints(len(unary))
    return header + unary + pack_fields(remainders, widths)


def decode(block: Bytes, count: int, old: Bits, dtype: Dtype) -> Indices:
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
    indices, at = np.empty(count, np.int32), 0
    for begin, order in orders(old, dtype, lane, firsts):
        chosen = counts[begin >> lane_bits :][: len(order.sizes)]
        places = Segments.of(order.sizes.ravel(), chosen.ravel()).decoded(unary, fields)
        indices[at : at + len(places)] = order.positions(places) + begin
        at += len(places)
    unary.finish()
    fields.finish()
    return indices


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
