"""A coded payload as bytes: a table by column, all index blocks, all value blocks.

docs/wire-format.md, section 4. Blocks of one kind lie side by side so that an entropy coder sees
one kind of numbers. What the blocks say is up to the codecs of `delta.codecs`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

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

COLUMNS = ROW.itemsize // 8 + 1  # of 64 bits: those of a row, and the digest of its old values
_SECTIONS = 3
_HEADER = struct.Struct("<6Q")  # length of each section, and how many bytes it takes here
_LEAST_COMPRESSED = 64  # bytes: shorter sections are stored


@dataclass(frozen=True, slots=True, eq=False)
class CodedPayload:
    """The sections of a coded payload.

    Attributes:
        rows: The patch table: codecs and lengths are those of the coded blocks.
        digests: uint64[rows], of the old values that a row was made from; 0 if it needs none.
        index, value: uint8[n], all blocks of a kind, row by row, without padding.
    """

    rows: Rows
    digests: NDArray[np.uint64]
    index: NDArray[np.uint8]
    value: NDArray[np.uint8]

    def to_bytes(self, *, compressed: bool) -> bytes:
        """The payload as it travels.

        Args:
            compressed: Whether each section that becomes shorter by it is a zstd frame.
        """
        words = self.rows.view("<u8").reshape(len(self.rows), -1)
        columns = np.concatenate((words.T, self.digests[None]))
        sections = [columns.tobytes(), self.index.tobytes(), self.value.tobytes()]
        stored = [_shortest(one) if compressed else one for one in sections]
        lengths = [n for pair in zip(sections, stored, strict=True) for n in map(len, pair)]
        return b"".join((_HEADER.pack(*lengths), *stored))

    @classmethod
    def from_bytes(cls, data: memoryview, *, num_rows: int, raw_bytes: int) -> CodedPayload:
        """Take a payload apart, in memory of about `raw_bytes`.

        Args:
            data: The payload as it came.
            num_rows: Rows of its table.
            raw_bytes: Length of the payload that it stands for.

        Raises:
            WireError: Rule W29 or W30 is broken.
        """
        if len(data) < _HEADER.size:
            raise TruncatedFrame(f"coded payload of {len(data)} bytes has no header")
        lengths = _HEADER.unpack(data[: _HEADER.size])
        full, stored = lengths[::2], lengths[1::2]
        if _HEADER.size + sum(stored) != len(data):
            raise TruncatedFrame(f"coded payload of {len(data)} bytes, its sections have others")
        if full[0] != num_rows * COLUMNS * 8:
            raise TruncatedFrame(f"a table of {full[0]} bytes for {num_rows} rows")
        if num_rows * ROW.itemsize + full[1] + full[2] > raw_bytes:
            raise LimitExceeded(
                f"coded blocks are longer than the {raw_bytes} bytes they stand for"
            )
        ends = list(accumulate(stored, initial=_HEADER.size))
        table, index, value = (
            np.frombuffer(_section(data[begin:end], size), np.uint8)
            for begin, end, size in zip(ends, ends[1:], full, strict=False)
        )
        columns = table.view("<u8").reshape(COLUMNS, num_rows)
        rows: Rows = np.ascontiguousarray(columns[:-1].T).view(ROW)[:, 0]
        found = cls(rows, columns[-1].astype(np.uint64), index, value)
        found._check()
        return found

    def bytes_by_codec(self, data: bytes | memoryview) -> dict[str, int]:
        """How many bytes of a payload each codec took; "table" has those of none.

        Blocks that one zstd frame holds share its length as they share what it inflates to.

        Args:
            data: The payload as it travels.
        """
        _, table, _, *rest = _HEADER.unpack(data[: _HEADER.size])
        found = {"table": _HEADER.size + table}
        codes = np.stack([self.rows[name] for name in ("index_codec", "value_codec")], axis=1)
        for name, stored in (("index_bytes", rest[0]), ("value_bytes", rest[2])):
            pairs, which = np.unique(codes, axis=0, return_inverse=True)
            ends = np.cumsum(np.bincount(which.ravel(), weights=self.rows[name]))
            ends = np.rint(ends * (stored / max(1.0, float(ends[-1])))).astype(np.int64)
            for pair, num_bytes in zip(pairs.tolist(), np.diff(ends, prepend=0), strict=True):
                called = codec_name(*pair)
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

    def _check(self) -> None:
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
        for name, section in (("index_bytes", self.index), ("value_bytes", self.value)):
            if rows[name].max() > len(section) or int(rows[name].sum()) != len(section):
                raise InvalidTable(f"{name} of the rows are not those of the blocks")


def codec_name(index_codec: int, value_codec: int) -> str:
    """What reports call rows of these codecs: "raw", "gap+ulp", "dense" and the like."""
    index, value = IndexCodec(index_codec), ValueCodec(value_codec)
    if index is IndexCodec.NONE:
        return "dense" if value is ValueCodec.RAW else f"dense+{value.name.lower()}"
    names = dict.fromkeys((index.name.lower(), value.name.lower()))
    return "+".join(names)


def _shortest(section: bytes) -> bytes:
    if len(section) < _LEAST_COMPRESSED:
        return section
    frame = compress(section)
    return frame if len(frame) < len(section) else section


def _section(data: memoryview, full: int) -> bytes | memoryview:
    is_stored = len(data) == full
    return decompress(data, compression="none" if is_stored else "zstd", raw_bytes=full)
