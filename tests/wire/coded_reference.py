"""Coded payloads once more, in plain Python integers: slow, obvious, independent.

docs/wire-format.md, section 4. Nothing of `deltasync` is used here. What a writer may choose, such
as widths and classes, is an argument.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.wire import reference

Field = tuple[int, int]
"""A number, and the bits that it takes."""


@dataclass(frozen=True)
class Kind:
    """A dtype: the sign it has, its bits, and where the key of `class` lies in them."""

    sign: str
    bits: int
    key_at: int
    key_bits: int

    def number(self, bits: int) -> int:
        """The number that rises with the value."""
        first = 1 << (self.bits - 1)
        if self.sign == "float" and bits & first:
            return bits ^ ((1 << self.bits) - 1)
        return bits if self.sign == "none" else bits ^ first

    def step(self, new: int, old: int) -> int:
        """The zigzag step."""
        step = (self.number(new) - self.number(old)) % (1 << self.bits)
        if step >= 1 << (self.bits - 1):
            step -= 1 << self.bits
        return 2 * step if step >= 0 else -2 * step - 1

    def key(self, bits: int) -> int:
        return bits >> self.key_at & ((1 << self.key_bits) - 1)

    def as_is(self, bits: Iterable[int]) -> bytes:
        return b"".join(one.to_bytes(self.bits // 8, "little") for one in bits)


BFLOAT16 = Kind("float", 16, 7, 8)
FLOAT32 = Kind("float", 32, 23, 8)
INT8 = Kind("signed", 8, 4, 4)


# Bits, fields and numbers


def fields(numbers: Iterable[Field]) -> bytes:
    whole = at = 0
    for number, width in numbers:
        whole |= number << at
        at += width
    return whole.to_bytes((at + 7) // 8, "little")


def unary(numbers: Iterable[int]) -> bytes:
    return fields((1 << number, number + 1) for number in numbers)


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def varints(*numbers: int) -> bytes:
    return b"".join(map(varint, numbers))


def words(numbers: Iterable[Field]) -> bytes:
    """Fields in a multiple of 4 bytes."""
    data = fields(numbers)
    return data + bytes(-len(data) % 4)


# gap and ulp


def gap(indices: Sequence[int], *, width: int) -> bytes:
    escape, before, codes = (1 << 8 * width) - 1, -1, list[int]()
    for index in indices:
        left, before = index - before - 1, index
        while left >= escape:
            codes.append(escape)
            left -= escape
        codes.append(left)
    planes = (bytes(code >> 8 * n & 255 for code in codes) for n in range(width))
    return bytes([width]) + b"".join(planes)


def ulp(new: Sequence[int], old: Sequence[int], kind: Kind) -> bytes:
    steps = [kind.step(*pair) for pair in zip(new, old, strict=True)]
    if kind.bits == 8:
        return bytes(steps)
    far = (bits for bits, step in zip(new, steps, strict=True) if step >= 255)
    return bytes(min(step, 255) for step in steps) + kind.as_is(far)


# block


def block_index(indices: Sequence[int], span: int, *, b: int, w: int) -> bytes:
    counts = [0] * -(-span // (1 << b))
    for index in indices:
        counts[index >> b] += 1
    offsets = words((index % (1 << b), b) for index in indices)
    return bytes([b, w, 0, 0]) + words((count, w) for count in counts) + offsets


def block_value(new: Sequence[int], old: Sequence[int], kind: Kind) -> bytes:
    codes, nibbles, whole = list[Field](), list[Field](), list[Field]()
    for bits, before in zip(new, old, strict=True):
        step = kind.step(bits, before)
        if step in (1, 2):
            codes.append((step - 1, 2))
        elif 3 <= step <= 18:
            codes.append((2, 2))
            nibbles.append((step - 3, 4))
        else:
            codes.append((3, 2))
            whole.append((bits, kind.bits))
    return words(codes) + words(nibbles) + words(whole)


# class


def classes(firsts: Sequence[int]) -> bytes:
    lengths = (b - a for a, b in pairwise(firsts))
    return varints(len(firsts), *lengths)


def class_of(key: int, firsts: Sequence[int]) -> int:
    return sum(key >= first for first in firsts[1:])


def subset(are_chosen: Sequence[bool]) -> list[tuple[int, Field]]:
    """(what goes to the unary stream, the field) of each element of a segment that is written."""
    size, chosen = len(are_chosen), sum(are_chosen)
    wanted = 2 * chosen <= size
    places = [n for n, is_chosen in enumerate(are_chosen) if is_chosen is wanted]
    m, k = len(places), 0
    while m and k < 32 and 25 * (size - m) + 12 * m > 52 * m << k:
        k += 1
    gaps = (b - a - 1 for a, b in zip([-1, *places], places, strict=False))
    return [(one >> k, (one & ((1 << k) - 1), k)) for one in gaps]


def class_index(
    indices: Sequence[int], old: Sequence[int], kind: Kind, *, lane: int, firsts: Sequence[int]
) -> bytes:
    """`old` has the bits of the whole span; lanes have 2^`lane` elements."""
    changed = set(indices)
    counts, written = list[list[int]](), list[tuple[int, Field]]()
    for begin in range(0, len(old), 1 << lane):
        inside = range(begin, min(begin + (1 << lane), len(old)))
        counts.append([])
        for number in range(len(firsts)):
            members = [i for i in inside if class_of(kind.key(old[i]), firsts) == number]
            are_chosen = [i in changed for i in members]
            counts[-1].append(sum(are_chosen))
            written += subset(are_chosen)
    by_class = list(zip(*counts, strict=True))
    widths = [(max(column) - min(column)).bit_length() for column in by_class]
    above = [
        (n - min(column), width)
        for column, width in zip(by_class, widths, strict=True)
        for n in column
    ]
    pairs = [n for column, w in zip(by_class, widths, strict=True) for n in (min(column), w)]
    stream = unary(quotient for quotient, _ in written)
    header = varints(lane) + classes(firsts) + varints(*pairs) + fields(above)
    return header + varint(len(stream)) + stream + fields(field for _, field in written)


def class_value(
    new: Sequence[int],
    old: Sequence[int],
    kind: Kind,
    *,
    firsts: Sequence[int],
    frequent: Sequence[int],
    rice: Sequence[int],
) -> bytes:
    """`rice` has the parameter of each class."""
    moves = [list[tuple[int, int]]() for _ in firsts]
    for bits, before in zip(new, old, strict=True):
        number = class_of(kind.key(before), firsts)
        moves[number].append(_move(kind.step(bits, before), frequent, kind))
    chosen = [[length > 1 for length, _ in one] for one in moves]
    gaps = [written for one in chosen for written in subset(one)]
    lengths, far = list[tuple[int, Field]](), list[int]()
    for one, p in zip(moves, rice, strict=True):
        for excess in (length - 2 for length, _ in one if length > 1):
            if excess >> p < 24:
                lengths.append((excess >> p, (excess & ((1 << p) - 1), p)))
            else:
                lengths.append((24, (0, 0)))
                far.append(excess)
    stream = unary(quotient for quotient, _ in gaps + lengths)
    low = fields(field for _, field in gaps + lengths)
    pairs = [n for one, p in zip(chosen, rice, strict=True) for n in (sum(one), p)]
    header = classes(firsts) + varint(len(frequent)) + kind.as_is(frequent)
    header += varints(*pairs, len(stream), len(low))
    directions = fields((direction, 1) for one in moves for _, direction in one)
    return header + directions + stream + low + kind.as_is(far)


def _move(step: int, frequent: Sequence[int], kind: Kind) -> tuple[int, int]:
    """(length, direction bit) of a zigzag step."""
    if step in frequent:
        step = frequent.index(step) + 1
    elif frequent:
        step += len(frequent) + 1
    return (1 << (kind.bits - 1), 0) if step == 0 else ((step + 1) // 2, step % 2)


# Payloads


def payload(
    rows: Sequence[tuple[int, ...]],
    digests: Sequence[int],
    blocks: Sequence[tuple[bytes, bytes]],
) -> bytes:
    """Rows as in `reference.payload`. Sections are stored as they are."""
    table = b"".join(reference.ROW.pack(*row) for row in rows)
    entries = [table[at : at + 8] for at in range(0, len(table), 8)]
    columns = [b"".join(entries[n::6]) for n in range(6)]
    columns.append(struct.pack(f"<{len(rows)}Q", *digests))
    sections = [b"".join(one) for one in (columns, *zip(*blocks, strict=True))]
    lengths = (len(section) for section in sections for _ in range(2))
    return struct.pack("<6Q", *lengths) + b"".join(sections)
