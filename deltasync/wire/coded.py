"""A coded payload as bytes: a table by column, all index blocks, all value blocks.

docs/wire-format.md, section 4. Blocks of one kind lie side by side so that an entropy coder sees
one kind of numbers. What the blocks say is up to the codecs of `delta.codecs`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import InvalidTable, LimitExceeded, TruncatedFrame, UnknownCodec
from deltasync.wire.codecs import (
    DENSE_CODECS,
    INDEX_ITEM_BYTES,
    SPARSE_CODECS,
    IndexCodec,
    ValueCodec,
)
from deltasync.wire.compression import compress, decompress
from deltasync.wire.table import ROW, RowKind, Rows

Ints: TypeAlias = NDArray[np.int64]
Table: TypeAlias = NDArray[np.uint8]

COLUMNS = ROW.itemsize // 8 + 1
"""Of the table, of 64 bits: those of a row, and the digest of its old values."""

ROW_BYTES = 8 * COLUMNS

_HEADER = struct.Struct("<6Q")  # length of each section, and how many bytes it takes here
HEADER_BYTES = _HEADER.size

_LEAST_COMPRESSED = 64  # bytes: shorter sections are stored


@dataclass(frozen=True, slots=True)
class Lengths:
    """Bytes of the table, of all index blocks, and of all value blocks.

    Attributes:
        full: Of each section.
        stored: What it takes in the payload.
    """

    full: tuple[int, int, int]
    stored: tuple[int, int, int]

    @classmethod
    def of(cls, data: bytes | memoryview) -> Self:
        """What the header of a payload says, or of its first bytes. Raises TruncatedFrame."""
        if len(data) < HEADER_BYTES:
            raise TruncatedFrame(f"coded payload of {len(data)} bytes has no header")
        lengths = _HEADER.unpack(data[:HEADER_BYTES])
        return cls(lengths[::2], lengths[1::2])

    def check(self, num_bytes: int, *, num_rows: int, raw_bytes: int) -> None:
        """Raises WireError where rule W29 is broken.

        Args:
            num_bytes: Length of the payload.
            num_rows: Rows of its table.
            raw_bytes: Length of the payload that it stands for.
        """
        if HEADER_BYTES + sum(self.stored) != num_bytes:
            raise TruncatedFrame(f"coded payload of {num_bytes} bytes, its sections have others")
        if self.full[0] != num_rows * ROW_BYTES:
            raise TruncatedFrame(f"a table of {self.full[0]} bytes for {num_rows} rows")
        if num_rows * ROW.itemsize + self.full[1] + self.full[2] > raw_bytes:
            raise LimitExceeded(
                f"coded blocks are longer than the {raw_bytes} bytes they stand for"
            )

    @property
    def are_stored(self) -> bool:
        """Whether no section is compressed."""
        return self.full == self.stored

    def to_bytes(self) -> bytes:
        """The header."""
        return _HEADER.pack(*(n for pair in zip(self.full, self.stored, strict=True) for n in pair))


@dataclass(frozen=True, slots=True, eq=False)
class CodedTable:
    """The first section of a coded payload.

    Attributes:
        rows: The patch table: codecs and lengths are those of the coded blocks.
        digests: uint64[rows], of the old values that a row was made from; 0 if it needs none.
    """

    rows: Rows
    digests: NDArray[np.uint64]

    @classmethod
    def read(cls, table: Table, lengths: Lengths) -> Self:
        """Take the table apart: uint8[n], inflated. Raises WireError where it breaks rule W30."""
        found = cls(*_columns(table))
        found._check(lengths)
        return found

    def columns(self) -> NDArray[np.uint64]:
        """uint64[COLUMNS, rows]: the table as it is written."""
        words = self.rows.view("<u8").reshape(len(self.rows), -1)
        return np.concatenate((words.T, self.digests[None]))

    def bytes_by_codec(self, lengths: Lengths) -> dict[str, int]:
        """How many bytes of a payload each codec took; "table" has those of none.

        Blocks that one zstd frame holds share its length as they share what it inflates to.
        """
        table, *rest = lengths.stored
        found = {"table": HEADER_BYTES + table}
        codes = self.rows["index_codec"].astype(np.int64) << 8 | self.rows["value_codec"]
        present = np.flatnonzero(np.bincount(codes))
        for name, stored in zip(("index_bytes", "value_bytes"), rest, strict=True):
            ends = np.cumsum(np.bincount(codes, weights=self.rows[name])[present])
            ends = np.rint(ends * (stored / max(1.0, float(ends[-1])))).astype(np.int64)
            for code, num_bytes in zip(present.tolist(), np.diff(ends, prepend=0), strict=True):
                called = codec_name(code >> 8, code & 0xFF)
                found[called] = found.get(called, 0) + int(num_bytes)
        return found

    def blocks(self) -> tuple[Ints, Ints]:
        """int64[rows + 1] each: where the index and the value blocks begin, and end."""
        columns = (self.rows[name].astype(np.int64) for name in ("index_bytes", "value_bytes"))
        index, value = (np.concatenate(([0], np.cumsum(column))) for column in columns)
        return index, value

    def raw_rows(self, item_sizes: NDArray[np.uint64]) -> Rows:
        """The table of the payload that this stands for.

        Args:
            item_sizes: uint64[rows], bytes of one element.
        """
        rows, is_sparse = self.rows.copy(), self.rows["kind"] == RowKind.SPARSE
        rows["index_codec"] = np.where(is_sparse, IndexCodec.RAW, IndexCodec.NONE)
        rows["value_codec"] = ValueCodec.RAW
        rows["index_bytes"] = np.where(is_sparse, rows["count"] * np.uint64(INDEX_ITEM_BYTES), 0)
        rows["value_bytes"] = rows["count"] * item_sizes
        return rows

    def _check(self, lengths: Lengths) -> None:
        """Rule W30: kinds, codecs and lengths, as far as they do not depend on a layout."""
        rows = self.rows
        codes = rows["index_codec"].astype(int) << 8 | rows["value_codec"]
        for kind, known in ((RowKind.SPARSE, SPARSE_CODECS), (RowKind.DENSE, DENSE_CODECS)):
            pairs = [index << 8 | value for index, value in known]
            if not np.isin(codes[rows["kind"] == kind], pairs).all():
                raise UnknownCodec(
                    "a row has an index or value codec that this build does not read"
                )
        if rows["index_bytes"][rows["kind"] == RowKind.DENSE].any():
            raise InvalidTable("a dense row has no indices")
        for name, section in zip(("index_bytes", "value_bytes"), lengths.full[1:], strict=True):
            if rows[name].max() > section or int(rows[name].sum()) != section:
                raise InvalidTable(f"{name} of the rows are not those of the blocks")


@dataclass(frozen=True, slots=True, eq=False)
class CodedPayload(CodedTable):
    """The sections of a coded payload in host memory.

    Attributes:
        index, value: uint8[n], all blocks of a kind, row by row, without padding.
    """

    index: NDArray[np.uint8]
    value: NDArray[np.uint8]

    def to_bytes(self, *, compressed: bool) -> bytes:
        """The payload as it travels.

        Args:
            compressed: Whether each section that becomes shorter by it is a zstd frame.
        """
        sections = [self.columns().tobytes(), self.index.tobytes(), self.value.tobytes()]
        stored = [_shortest(one) if compressed else one for one in sections]
        table, index, value = map(len, sections)
        taken = len(stored[0]), len(stored[1]), len(stored[2])
        return b"".join((Lengths((table, index, value), taken).to_bytes(), *stored))

    @classmethod
    def from_bytes(cls, data: memoryview, *, num_rows: int, raw_bytes: int) -> Self:
        """Take a payload apart, in memory of about `raw_bytes`.

        Args:
            data: The payload as it came.
            num_rows: Rows of its table.
            raw_bytes: Length of the payload that it stands for.

        Raises:
            WireError: Rule W29 or W30 is broken.
        """
        lengths = Lengths.of(data)
        lengths.check(len(data), num_rows=num_rows, raw_bytes=raw_bytes)
        ends = list(accumulate(lengths.stored, initial=HEADER_BYTES))
        table, index, value = (
            np.frombuffer(_section(data[begin:end], size), np.uint8)
            for begin, end, size in zip(ends, ends[1:], lengths.full, strict=False)
        )
        found = cls(*_columns(table), index, value)
        found._check(lengths)
        return found


def codec_name(index_codec: int, value_codec: int) -> str:
    """What reports call rows of these codecs: "raw", "gap+ulp", "dense" and the like."""
    index, value = IndexCodec(index_codec), ValueCodec(value_codec)
    if index is IndexCodec.NONE:
        return "dense" if value is ValueCodec.RAW else f"dense+{value.name.lower()}"
    names = dict.fromkeys((index.name.lower(), value.name.lower()))
    return "+".join(names)


def _columns(table: Table) -> tuple[Rows, NDArray[np.uint64]]:
    """(rows, digests) of a table by column, whose length was checked."""
    columns = table.view("<u8").reshape(COLUMNS, -1)
    rows: Rows = np.ascontiguousarray(columns[:-1].T).view(ROW)[:, 0]
    return rows, columns[-1].astype(np.uint64)


def _shortest(section: bytes) -> bytes:
    if len(section) < _LEAST_COMPRESSED:
        return section
    frame = compress(section)
    return frame if len(frame) < len(section) else section


def _section(data: memoryview, full: int) -> bytes | memoryview:
    is_stored = len(data) == full
    return decompress(data, compression="none" if is_stored else "zstd", raw_bytes=full)
