"""The value block of `class`: how far elements moved, by the exponents of the old ones.

Elements are ordered by class, then by position. Written are the directions of all moves; which of
them are longer than one, as `subsets` does; and how much longer than two these are, by Rice's code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltasync.dtypes import Dtype
from deltasync.errors import InvalidTable, TruncatedFrame
from deltasync.files.classes import keys as class_keys
from deltasync.files.classes.bitstream import (
    MAX_WIDTH,
    Bits,
    Bytes,
    FieldReader,
    Ints,
    Words,
    pack_fields,
    unsigned_dtype,
)
from deltasync.files.classes.frequent import Frequent
from deltasync.files.classes.keys import Keys
from deltasync.files.classes.streams import ByteReader, UnaryReader, pack_unary, varints
from deltasync.files.classes.subsets import Segments

COST_OF_CLASS = 40.0
"""Bits that a class takes in the header, about."""

ESCAPE = 24
"""The quotient of a length that is written as it is."""

_SAMPLE = 1 << 15  # lengths that parameters are chosen by


Choice = tuple[list[int], Ints]
"""The first keys of classes, and the Rice parameter of each."""


def encode(steps: Bits, old: Bits, dtype: Dtype, choice: Choice | None = None) -> bytes:
    """The block of zigzag steps, unsigned[n], of elements with old bits, unsigned[n].

    `choice` None is the one that makes the block short.
    """
    keys, frequent = class_keys.keys(old, dtype), Frequent.of(steps, dtype)
    moves = frequent.numbers(steps)
    firsts, parameters = choice or _fit(keys, _lengths(moves, dtype), dtype)
    order, sizes = _order(keys, firsts, dtype)
    moves = moves[order]
    lengths, downwards = _lengths(moves, dtype), moves.astype(np.uint8) & 1
    longer = np.flatnonzero(lengths > 1)
    ends = np.cumsum(sizes)
    chosen = np.diff(np.searchsorted(longer, ends), prepend=0)
    quotients, remainders, widths = Segments.of(sizes, chosen).coded(longer)
    excess, each = lengths[longer] - np.uint64(2), np.repeat(parameters, chosen)
    over = excess >> each.astype(np.uint64)
    is_escaped = over >= ESCAPE
    each = np.where(is_escaped, 0, each)
    low = excess & ((np.uint64(1) << each.astype(np.uint64)) - np.uint64(1))
    unary = pack_unary(
        np.concatenate([quotients, np.minimum(over, np.uint64(ESCAPE)).astype(np.int64)])
    )
    fields = pack_fields(np.concatenate([remainders, low]), np.concatenate([widths, each]))
    numbers = np.stack([chosen, parameters], 1).ravel().tolist()
    header = class_keys.write_firsts(firsts) + frequent.to_bytes()
    header += varints(*numbers, len(unary), len(fields))
    escapes = excess[is_escaped].astype(unsigned_dtype(dtype)).tobytes()
    directions = np.packbits(downwards, bitorder="little").tobytes()
    return header + directions + unary + fields + escapes


def decode(block: Bytes, old: Bits, dtype: Dtype) -> Bits:
    """unsigned[n]: the zigzag steps. Raises WireError for a block that `encode` cannot make."""
    reader = ByteReader(block)
    firsts, frequent = class_keys.read_firsts(reader, dtype), Frequent.read(reader, dtype)
    order, sizes = _order(class_keys.keys(old, dtype), firsts, dtype)
    numbers = [(reader.varint(), reader.varint()) for _ in firsts]
    chosen, parameters = (np.array(column, np.int64) for column in zip(*numbers, strict=True))
    if parameters.max() > MAX_WIDTH:
        raise InvalidTable(f"lengths have {parameters.max()} low bits; {MAX_WIDTH} are the most")
    unary_bytes, field_bytes = reader.varint(), reader.varint()
    downwards = np.unpackbits(reader.take((len(old) + 7) // 8), bitorder="little")[: len(old)]
    unary = UnaryReader(reader.take(unary_bytes))
    fields = FieldReader(reader.take(field_bytes))
    longer = Segments.of(sizes, chosen).decoded(unary, fields)
    lengths = np.ones(len(old), np.uint64)
    lengths[longer] = _excess(np.repeat(parameters, chosen), unary, fields, reader, dtype)
    lengths[longer] += np.uint64(2)
    steps = np.empty(len(old), unsigned_dtype(dtype))
    steps[order] = frequent.back((lengths << np.uint64(1)) - downwards)
    return steps


def _excess(
    parameters: Ints, unary: UnaryReader, fields: FieldReader, reader: ByteReader, dtype: Dtype
) -> Words:
    """uint64[n]: by how much lengths exceed 2. Raises WireError."""
    over = unary.take(len(parameters))
    if (over > ESCAPE).any():
        raise InvalidTable(f"a quotient over {ESCAPE}")
    is_escaped = over == ESCAPE
    widths = np.where(is_escaped, 0, parameters)
    excess = (over << widths).astype(np.uint64) + fields.take(widths)
    unary.finish()
    fields.finish()
    escapes = reader.rest()
    if len(escapes) != (wanted := np.count_nonzero(is_escaped) * dtype.item_size):
        raise TruncatedFrame(f"{len(escapes)} bytes of long steps, not {wanted}")
    excess[is_escaped] = np.ascontiguousarray(escapes).view(unsigned_dtype(dtype))
    return excess


def _lengths(moves: Words, dtype: Dtype) -> Words:
    """uint64[n]: how far moves go. To stay, 0, goes as far as possible upwards: around."""
    farthest = np.uint64(1 << 8 * dtype.item_size - 1)
    one = np.uint64(1)
    return np.where(moves == 0, farthest, (moves >> one) + (moves & one))


def _order(keys: Keys, firsts: list[int], dtype: Dtype) -> tuple[Ints, Ints]:
    """int64[n] positions by class and position, and int64[classes] sizes."""
    classes = class_keys.table(firsts, dtype).take(keys)
    return np.argsort(classes, kind="stable"), np.bincount(classes, minlength=len(firsts))


def _fit(keys: Keys, lengths: Words, dtype: Dtype) -> tuple[list[int], Ints]:
    """The first keys of the classes that make the block short, and their Rice parameters."""
    number = class_keys.num_keys(dtype)
    found = np.bincount(keys, minlength=number)
    begin, end = class_keys.window(found)
    places = np.maximum(keys, begin).astype(np.int64) - begin
    longer = np.flatnonzero(lengths > 1)
    at = places[longer]
    costs = _rice_costs(lengths[longer] - np.uint64(2), at, end - begin, dtype)
    sums = class_keys.spans(costs)
    few = class_keys.spans(np.bincount(at, minlength=end - begin).astype(np.float64))
    many = class_keys.spans(np.bincount(places, minlength=end - begin).astype(np.float64))
    firsts = class_keys.divide(class_keys.entropy(few, many) + sums.min(2) + COST_OF_CLASS)
    stops = [*firsts[1:], end - begin]
    parameters = [int(sums[i, j].argmin()) for i, j in zip(firsts, stops, strict=True)]
    return [0] + [first + begin for first in firsts[1:]], np.array(parameters, np.int64)


def _rice_costs(excess: Words, places: Ints, num_places: int, dtype: Dtype) -> NDArray[np.float64]:
    """float64[places, parameters]: bits of the excesses at each place by parameter, roughly."""
    step = 1 + len(excess) // _SAMPLE
    most = min(int(excess.max(initial=0)).bit_length(), MAX_WIDTH)
    excess, places = excess[::step], places[::step]
    costs = np.zeros((num_places, most + 1))
    escaped = np.uint64(ESCAPE + 1 + 8 * dtype.item_size)
    for k in range(most + 1):
        over = excess >> np.uint64(k)
        bits = np.where(over < ESCAPE, over + np.uint64(1 + k), escaped)
        costs[:, k] = np.bincount(places, bits.astype(np.float64), num_places)
    return costs * step
