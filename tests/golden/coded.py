"""The coded payloads among the golden bytes, made from the plain reference.

A receiver needs the old weights to decode them: `old` says what they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zstandard

from tests.wire import coded_reference as plain
from tests.wire import reference

PARAMETERS: list[Any] = [
    [["layer.weight"], [30, 40], 16],
    [["bias"], [120], 18],
    [["codes"], [12, 16], 3],
]
"""Names, shape and dtype code: bfloat16, float32, int8."""

KINDS = [plain.BFLOAT16, plain.FLOAT32, plain.INT8]


def old(parameter: int, position: int) -> int:
    """The bits that an element has before."""
    n = position
    if parameter == 0:  # small ones at every fourth place, and both signs
        return (0x3A00 if n % 4 == 0 else 0x3E00 + 128 * (n % 3)) + n % 100 + 0x8000 * (n % 5 == 0)
    if parameter == 1:
        return 0x3F000000 + 0x00010003 * n + 0x80000000 * (n % 2)
    return 37 * n % 256


@dataclass(frozen=True)
class Row:
    """One row: `new` are bits; `indices` are None when it is dense."""

    parameter: int
    start: int
    span: int
    indices: tuple[int, ...] | None
    new: tuple[int, ...]

    @property
    def places(self) -> list[int]:
        """Positions of what it writes."""
        within = range(self.span) if self.indices is None else self.indices
        return [self.start + index for index in within]

    @property
    def kind(self) -> plain.Kind:
        return KINDS[self.parameter]

    @property
    def old(self) -> list[int]:
        """Of what it writes."""
        return [old(self.parameter, place) for place in self.places]

    @property
    def span_old(self) -> list[int]:
        return [old(self.parameter, self.start + n) for n in range(self.span)]


def moved(
    parameter: int, start: int, span: int, indices: tuple[int, ...] | None, by: tuple[int, ...]
) -> Row:
    """A row that adds the numbers `by`, over and over, to the bits."""
    made = Row(parameter, start, span, indices, ())
    bits = (1 << made.kind.bits) - 1
    new = tuple(one + by[n % len(by)] & bits for n, one in enumerate(made.old))
    return Row(parameter, start, span, indices, new)


def special(row: Row, at: dict[int, int]) -> Row:
    """The row with other new bits in some places."""
    new = tuple(at.get(n, bits) for n, bits in enumerate(row.new))
    return Row(row.parameter, row.start, row.span, row.indices, new)


CHANGED = (*(n for n in range(0, 1000, 4) if n % 11 < 6), 1001, 1002, 1198)
ROWS = [
    special(
        moved(0, 0, 1200, CHANGED, (1, -1, 1, 1, -2, 3, -1, 9)),
        {0: 0x8000, 5: 0x7FC1, 40: 0x0000, 77: 0xFF80},  # -0.0, a NaN, 0.0, minus infinity
    ),
    special(moved(1, 0, 100, tuple(range(3, 100, 7)), (1, -1, 5)), {2: 0xFFC00001}),
    moved(1, 100, 20, None, (1, 0, 0, -1, 300)),
    moved(2, 0, 192, tuple(range(0, 192, 3)), (16, -16, 1)),
]
SPARSE, DENSE = 1, 2
RAW, GAP, BLOCK, CLASS = 1, 2, 3, 4  # of indices
ULP, CLASS_VALUE, BLOCK_VALUE = 2, 3, 4

Blocks = tuple[int, int, bytes, bytes]
"""Index codec, value codec, index block, value block."""


def by_gap(row: Row) -> Blocks:
    value = plain.ulp(row.new, row.old, row.kind)
    if row.indices is None:
        return 0, ULP, b"", value
    return GAP, ULP, plain.gap(row.indices, width=1), value


def by_mixed(row: Row) -> Blocks:
    """The other pairs, one for each row; gaps have 2 bytes."""
    value = row.kind.as_is(row.new)
    if row.indices is None:
        return 0, RAW, b"", value
    if row.parameter == 0:
        return GAP, RAW, plain.gap(row.indices, width=2), value
    index = struct.pack(f"<{len(row.indices)}i", *row.indices)
    if row.parameter == 1:
        return RAW, RAW, index, value
    return RAW, ULP, index, plain.ulp(row.new, row.old, row.kind)


def by_block(row: Row) -> Blocks:
    if row.indices is None:
        return by_gap(row)
    index = plain.block_index(row.indices, row.span, b=4, w=3 if row.parameter == 2 else 2)
    return BLOCK, BLOCK_VALUE, index, plain.block_value(row.new, row.old, row.kind)


@dataclass(frozen=True)
class Classes:
    """What a writer of `class` chose for a row.

    Attributes:
        index, value: First keys of the classes of each block.
        rice: The parameter *p* of each class of the value block.
        frequent: Steps that the value block lists.
    """

    index: list[int]
    value: list[int]
    rice: list[int]
    frequent: list[int]


CHOSEN = {
    0: Classes([0, 117], [0], [1], []),
    1: Classes([0], [0], [1], []),
    2: Classes([0], [0], [0], [32, 2, 31]),
}
LANES = {
    0: Classes([0, 120], [0, 117, 124], [0, 1, 2], []),
    1: Classes([0], [0, 127], [3, 0], []),
    2: Classes([0, 3, 9], [0, 15], [0, 3], [31, 2]),
}


def by_class(row: Row, chosen: dict[int, Classes] = CHOSEN, lane: int = 18) -> Blocks:
    if row.indices is None:
        return by_gap(row)
    one, before, kind = chosen[row.parameter], row.old, row.kind
    index = plain.class_index(row.indices, row.span_old, kind, lane=lane, firsts=one.index)
    value = plain.class_value(
        row.new, before, kind, firsts=one.value, frequent=one.frequent, rice=one.rice
    )
    return CLASS, CLASS_VALUE, index, value


def by_class_of_lanes(row: Row) -> Blocks:
    """With more classes than pay, lanes of 1,024 elements, and a list of frequent steps."""
    return by_class(row, LANES, 10)


CODECS: dict[str, Callable[[Row], Blocks]] = {
    "gap": by_gap,
    "block": by_block,
    "class": by_class,
    "mixed": by_mixed,
    "class-lanes": by_class_of_lanes,
}
"""By the file that has them. The last two are what another writer may choose: only decoded."""

MADE = ("gap", "block", "class")
"""Those whose choices are the package's own."""


def payload(codec: str) -> bytes:
    """The coded form of `ROWS`, its sections stored."""
    table, digests, blocks = [], [], []
    for row in ROWS:
        index_codec, value_codec, index, value = CODECS[codec](row)
        kind = DENSE if row.indices is None else SPARSE
        lengths = (len(row.new), len(index), len(value))
        codecs = (kind, index_codec, value_codec, 0)
        table.append((row.parameter, *codecs, row.start, row.span, *lengths))
        key = reference.seed(PARAMETERS[row.parameter][0][0])
        digest = 0 if value_codec == RAW else reference.digest(key, row.places, row.old)
        digests.append(digest)
        blocks.append((index, value))
    return plain.payload(table, digests, blocks)


def compressed(data: bytes) -> bytes:
    """The same payload with each section a zstd frame: its bytes depend on a library's version."""
    lengths = struct.unpack_from("<6Q", data)[::2]
    sections, at = list[bytes](), 48
    for length in lengths:
        sections.append(zstandard.ZstdCompressor(level=1).compress(data[at : at + length]))
        at += length
    pairs = (n for pair in zip(lengths, map(len, sections), strict=True) for n in pair)
    return struct.pack("<6Q", *pairs) + b"".join(sections)


def raw_payload() -> bytes:
    """What all of them stand for."""
    table, blocks = [], []
    for row in ROWS:
        index = b"" if row.indices is None else struct.pack(f"<{len(row.indices)}i", *row.indices)
        value, is_dense = row.kind.as_is(row.new), row.indices is None
        codecs = (DENSE, 0, RAW, 0) if is_dense else (SPARSE, RAW, RAW, 0)
        lengths = (len(row.new), len(index), len(value))
        table.append((row.parameter, *codecs, row.start, row.span, *lengths))
        blocks.append((index, value))
    return reference.payload(table, blocks)
