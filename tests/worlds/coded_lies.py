"""The lies of coded payloads, rules W27 to W36: see `worlds.lies`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deltasync.delta.bits import as_bits
from deltasync.errors import (
    DeltaSyncError,
    InvalidIndices,
    InvalidTable,
    LimitExceeded,
    TruncatedFrame,
    UnknownCodec,
    WireError,
    WrongBase,
)
from deltasync.store.classes.codec import ClassCodec as ClassCodec  # reads and writes `class`
from deltasync.transports.base import Frame
from tests.golden.make_golden import bucket_message
from tests.wire import coded_reference as plain
from tests.wire import reference
from tests.worlds.lies import GIANT, LYING_FIELDS, Lie, header_of
from tests.worlds.peers import DENSE, NEXT, Row, model, packed, tensor

OLD = [as_bits(one.data).view(-1).tolist() for one in model().parameters()]
REFERENCE_KINDS = (plain.BFLOAT16, plain.FLOAT32)
PLACES = (0, 1, 4, 9, 15, 16, 17, 22, 30, 31, 38, 39)
RAW_CODECS, GAP, BLOCK, CLASS = (1, 1), (2, 2), (3, 4), (4, 3)  # of indices and values
Edit = Callable[[bytes], bytes]


def as_it_is(block: bytes) -> bytes:
    return block


def unsigned(bits: int, kind: plain.Kind) -> int:
    return bits % (1 << kind.bits)


@dataclass(frozen=True)
class Coded(Row):
    """A row of a coded payload: `index` and `value` alter its blocks."""

    indices: tuple[int, ...] | None = PLACES
    codecs: tuple[int, int] = BLOCK
    index: Edit = as_it_is
    value: Edit = as_it_is
    digest: int | None = None

    @property
    def kind(self) -> plain.Kind:
        return REFERENCE_KINDS[self.parameter]

    @property
    def span_old(self) -> list[int]:
        return [unsigned(bits, self.kind) for bits in OLD[self.parameter]]

    @property
    def old(self) -> list[int]:
        return [self.span_old[at] for at in self.positions]

    @property
    def new(self) -> list[int]:
        """One or two steps from the old ones; the third one far away."""
        moved = [unsigned(bits + 1 + n % 2, self.kind) for n, bits in enumerate(self.old)]
        return [*moved[:2], 0x4141, *moved[3:]]

    def blocks(self) -> list[bytes]:
        places, new, old, kind = self.positions, self.new, self.old, self.kind
        if self.indices is None:
            index, value = b"", plain.ulp(new, old, kind)
        elif self.codecs == RAW_CODECS:
            index, value = struct.pack(f"<{len(places)}i", *places), kind.as_is(new)
        elif self.codecs == GAP:
            index, value = plain.gap(places, width=1), plain.ulp(new, old, kind)
        elif self.codecs == BLOCK:
            index = plain.block_index(places, self.span, b=4, w=3)
            value = plain.block_value(new, old, kind)
        else:
            index = plain.class_index(places, self.span_old, kind, lane=10, firsts=[0])
            value = plain.class_value(new, old, kind, firsts=[0], frequent=[], rice=[1])
        return [self.index(index), self.value(value)]

    def fields(self) -> tuple[int, ...]:
        codecs = (0, 2) if self.indices is None else self.codecs
        said = dict(zip(("index_codec", "value_codec"), codecs, strict=True)) | dict(self.lies)
        return Row.fields(replace(self, lies=said))

    def digest_of_old(self) -> int:
        if self.digest is not None or self.codecs == RAW_CODECS:
            return self.digest or 0
        return reference.digest(reference.seed("ab"[self.parameter]), self.positions, self.old)

    def plain(self) -> Row:
        return Row(self.parameter, self.indices, self.start, self.span)


DENSE_CODED = Coded(parameter=1, indices=None, span=30)


def coded(
    *rows: Coded, at: int | None = None, says: int = 0, behind: bytes = b"", more: int = 0
) -> Frame:
    """A bucket of coded rows; `says` stands at byte `at` of the payload, and `behind` behind it.

    `more` is added to the length of the payload that it stands for.
    """
    blocks = [(index, value) for index, value in (row.blocks() for row in rows)]
    digests = [row.digest_of_old() for row in rows]
    data = bytearray(plain.payload([row.fields() for row in rows], digests, blocks) + behind)
    if at is not None:
        struct.pack_into("<Q", data, at, says)
    raw_bytes = len(packed(*(row.plain() for row in rows)))
    return coded_bucket(bytes(data), raw_bytes + more, len(rows))


def coded_bucket(data: bytes, raw_bytes: int, num_rows: int = 1) -> Frame:
    said = {"num_rows": num_rows, "raw_bytes": raw_bytes, "compression": "coded"}
    message = bucket_message([]) | {"version": NEXT} | said
    return Frame(header_of(message, len(data)), tensor(data))


def of(error: type[DeltaSyncError], *rows: Coded, **payload: Any) -> Lie:
    return Lie(error, [coded(*rows, **payload)])


def blocks(error: type[DeltaSyncError], codecs: tuple[int, int], **edits: Edit) -> Lie:
    """Blocks that fit the table, whatever is in them."""
    return Lie(error, [coded(Coded(codecs=codecs, **edits))])  # type: ignore[arg-type]


def put(at: int, *data: int) -> Edit:
    return lambda block: block[:at] + bytes(data) + block[at + len(data) :]


def less(count: int) -> Edit:
    return lambda block: block[: len(block) - count]


def more(*data: int) -> Edit:
    return lambda block: block + bytes(data)


def becomes(*parts: bytes) -> Edit:
    return lambda block: b"".join(parts)


def unstored(section: int, says: int) -> dict[str, int]:
    """A section of which the header says another length than it takes."""
    return {"at": 16 * section, "says": says}


CODED_FIELDS = {
    f"{name}, coded": Lie(error, [coded(replace(one, lies=lies))])
    for name, row, lies, error in LYING_FIELDS
    for one in [DENSE_CODED if row is DENSE else Coded()]
    if not ({"index_bytes", "value_bytes"} & lies.keys() and 0 in lies.values())
}
CODED: dict[str, Lie] = {
    **CODED_FIELDS,
    "w29 no header": Lie(TruncatedFrame, [coded_bucket(bytes(47), 120)]),
    "w29 nothing": Lie(WireError, [coded_bucket(b"", 120)]),
    "w29 a table of two rows": of(TruncatedFrame, Coded(), at=0, says=112),
    "w29 sections beyond the payload": of(TruncatedFrame, Coded(), at=8, says=GIANT),
    "w29 a bomb of indices": of(LimitExceeded, Coded(), **unstored(1, 1 << 40)),
    "w29 a bomb of values": of(LimitExceeded, Coded(), **unstored(2, 1 << 63)),
    "w29 a section that is no zstd frame": of(WireError, Coded(), **unstored(2, 30)),
    "w29 bytes behind": of(TruncatedFrame, Coded(), behind=bytes(7)),
    "w29 stands for more": of(WireError, Coded(), more=8),
    "w29 stands for less": of(WireError, Coded(), more=-100),
    "w30 a pair of codecs that is none": of(UnknownCodec, Coded(codecs=(3, 3))),
    "w30 a dense row with indices": of(InvalidTable, replace(DENSE_CODED, index=more(0, 0, 0, 0))),
    "w30 lengths of another sum": of(InvalidTable, Coded(lies={"index_bytes": 15})),
    "w31 another base": of(WrongBase, Coded(digest=1)),
    "w31 another base, by gaps": of(WrongBase, Coded(codecs=GAP, digest=1)),
    "w31 another base, by classes": of(WrongBase, Coded(codecs=CLASS, digest=1)),
    "w31 another base of a dense row": of(WrongBase, replace(DENSE_CODED, digest=1)),
    **{
        f"w14 raw indices {wrong} of a coded payload": Lie(
            InvalidIndices,
            [coded(Coded(codecs=RAW_CODECS, index=put(0, *struct.pack("<2i", *wrong))))],
        )
        for wrong in ((5, 5), (7, 3), (-1, 5), (-(2**31), 5), (5, 2**31 - 1))
    },
    "w17 raw indices of another length": blocks(TruncatedFrame, RAW_CODECS, index=less(4)),
    "w17 raw values of another length": blocks(TruncatedFrame, RAW_CODECS, value=less(1)),
    "w27 width 0": blocks(WireError, GAP, index=put(0, 0)),
    "w27 width 3": blocks(WireError, GAP, index=put(0, 3)),
    "w27 empty": blocks(WireError, GAP, index=becomes()),
    "w27 odd with width 2": blocks(WireError, GAP, index=put(0, 2)),
    "w27 ends in an escape": blocks(WireError, GAP, index=put(12, 255)),
    "w27 fewer than the count": blocks(WireError, GAP, index=less(1)),
    "w27 more than the count": blocks(WireError, GAP, index=more(0)),
    "w27 beyond the span": blocks(InvalidIndices, GAP, index=put(12, 200)),
    "w28 values cut": blocks(TruncatedFrame, GAP, value=less(1)),
    "w28 bytes behind the values": blocks(TruncatedFrame, GAP, value=more(0)),
    "w28 an escape without its element": blocks(TruncatedFrame, GAP, value=put(0, 255)),
    "w28 a dense row of fewer steps": Lie(
        TruncatedFrame, [coded(replace(DENSE_CODED, value=lambda _: bytes(20)))]
    ),
    "w32 blocks of 8": blocks(InvalidTable, BLOCK, index=put(0, 3)),
    "w32 blocks of 2^17": blocks(InvalidTable, BLOCK, index=put(0, 17)),
    "w32 no bits for counts": blocks(InvalidTable, BLOCK, index=put(1, 0)),
    "w32 more bits than a count can need": blocks(InvalidTable, BLOCK, index=put(1, 6)),
    "w32 first reserved byte": blocks(InvalidTable, BLOCK, index=put(2, 1)),
    "w32 second reserved byte": blocks(InvalidTable, BLOCK, index=put(3, 1)),
    "w32 half a header": blocks(TruncatedFrame, BLOCK, index=becomes(b"\4\3\0")),
    "w32 no offsets": blocks(TruncatedFrame, BLOCK, index=less(8)),
    "w32 a byte behind": blocks(TruncatedFrame, BLOCK, index=more(0)),
    "w32 a word behind": blocks(TruncatedFrame, BLOCK, index=more(0, 0, 0, 0)),
    "w32 counts of more changes": blocks(InvalidIndices, BLOCK, index=put(4, 255)),
    "w32 counts of fewer changes": blocks(InvalidIndices, BLOCK, index=put(4, 0)),
    "w14 offsets that fall": blocks(InvalidIndices, BLOCK, index=put(8, 0xFF)),
    "w33 no values": blocks(TruncatedFrame, BLOCK, value=becomes()),
    "w33 half the codes": blocks(TruncatedFrame, BLOCK, value=becomes(b"\1\0")),
    "w33 codes alone": blocks(TruncatedFrame, BLOCK, value=lambda block: block[:4]),
    "w33 a byte less": blocks(TruncatedFrame, BLOCK, value=less(1)),
    "w33 a word less": blocks(TruncatedFrame, BLOCK, value=less(4)),
    "w33 a byte behind": blocks(TruncatedFrame, BLOCK, value=more(0)),
    "w33 a word behind": blocks(TruncatedFrame, BLOCK, value=more(0, 0, 0, 0)),
    # A damaged index block of `class` cannot be told from another base.
    "w34 lanes of 2^9": blocks(WrongBase, CLASS, index=put(0, 9)),
    "w34 lanes of 2^21": blocks(WrongBase, CLASS, index=put(0, 21)),
    "w34 a lane size that does not end": blocks(
        WrongBase, CLASS, index=lambda block: b"\x8a\x80\x80\x80\x80\0" + block[1:]
    ),
    "w34 no class": blocks(WrongBase, CLASS, index=put(1, 0)),
    "w34 more changes than a lane has": blocks(
        WrongBase, CLASS, index=lambda block: block[:2] + plain.varint((1 << 10) + 1) + block[3:]
    ),
    "w34 a width of 12": blocks(WrongBase, CLASS, index=put(3, 12)),
    "w34 65 classes": blocks(InvalidTable, CLASS, value=becomes(plain.varints(65, *[1] * 30))),
    "w34 a class of no keys": blocks(InvalidTable, CLASS, value=becomes(plain.varints(2, 0))),
    "w34 a class beyond the keys": blocks(
        InvalidTable, CLASS, value=becomes(plain.varints(2, 256))
    ),
    "w34 65 frequent steps": blocks(
        InvalidTable, CLASS, value=becomes(plain.varints(1, 65), bytes(30))
    ),
    "w34 lengths of 57 bits": blocks(
        InvalidTable, CLASS, value=becomes(plain.varints(1, 0, 1, 57), bytes(30))
    ),
    "w35 another count": blocks(WrongBase, CLASS, index=put(2, 11)),
    "w35 more far steps than changes": blocks(
        InvalidIndices, CLASS, value=becomes(plain.varints(1, 0, 13, 0), bytes(40))
    ),
    "w36 an index block cut": blocks(WrongBase, CLASS, index=less(1)),
    "w36 an index block and a byte": blocks(WrongBase, CLASS, index=more(0)),
    "w36 an empty index block": blocks(WrongBase, CLASS, index=becomes()),
    **{
        f"w36 a value block less {count}": blocks(TruncatedFrame, CLASS, value=less(count))
        for count in range(1, 8)
    },
    "w36 no value block": blocks(TruncatedFrame, CLASS, value=becomes()),
    "w36 a value block and a byte": blocks(TruncatedFrame, CLASS, value=more(0)),
    "w36 a length of 25 ones": blocks(
        InvalidTable,
        CLASS,
        value=becomes(plain.varints(1, 0, 1, 0, 4, 1), bytes(2), plain.unary([0, 25]), b"\0\x64\0"),
    ),
}
