"""The codec `block`: fields of fixed widths, without an entropy coder.

A row is cut into blocks of 2^b elements. Positions are the number of changes in each block, and an
offset of b bits for each change. A value is 2 bits if it moved by one step, and a nibble more if
it moved by up to nine. The sums of the counts say where everything is, so that a GPU decodes each
block alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.delta.codecs import steps
from deltasync.delta.codecs.base import (
    Bits,
    Block,
    CodedRow,
    Indices,
    Needs,
    SparseRow,
    unsigned_dtype,
)
from deltasync.delta.codecs.bitstream import FieldReader, Ints, pack_fields
from deltasync.dtypes import Dtype
from deltasync.errors import InvalidIndices, InvalidTable, TruncatedFrame
from deltasync.wire.codecs import IndexCodec, ValueCodec

BLOCK_BITS = range(4, 17)
"""Elements of a block, as powers of two."""

HEADER_BYTES = 4
WORD_BYTES = 4
"""Fields of one kind begin at a multiple of this."""

CODE_BITS, NIBBLE_BITS = 2, 4
NIBBLE, AS_IS = 2, 3
"""Codes of values that need more than their code; the other codes are zigzag steps 1 and 2."""

FIRST_NIBBLE = 3
"""The zigzag step that is nibble 0."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths that a row's index block has.

    Attributes:
        block_bits: Of an offset.
        count_bits: Of a block's count, 1 to block_bits + 1.
    """

    block_bits: int
    count_bits: int

    @classmethod
    def of(cls, indices: Indices, span: int) -> Shape:
        """The one that makes the index block of int32[n] indices shortest."""
        shapes = [cls(bits, _most(indices, bits).bit_length()) for bits in BLOCK_BITS]
        return min(shapes, key=lambda shape: shape.index_bits(len(indices), span))

    def num_blocks(self, span: int) -> int:
        """Blocks of a row of `span` elements; the last one may be shorter."""
        return -(-span // (1 << self.block_bits))

    def index_bits(self, count: int, span: int) -> int:
        """What `count` indices take, without header and padding."""
        return count * self.block_bits + self.num_blocks(span) * self.count_bits


class BlockCodec:
    """Codes a row in independent blocks; see `RowCodec`."""

    index_codec = IndexCodec.BLOCK
    value_codec = ValueCodec.BLOCK
    needs = Needs.CHANGED

    def encode(self, row: SparseRow) -> tuple[bytes, bytes]:
        """(index block, value block) of a row; `old` has the bits at the indices."""
        index = encode_indices(row.indices, Shape.of(row.indices, row.span), row.span)
        return index, encode_values(row.new, row.old, row.dtype)

    def indices(self, row: CodedRow) -> Indices:
        """int32[count]. Raises WireError."""
        return decode_indices(row.index, row.count, row.span)

    def values(self, row: CodedRow, old: Bits) -> Bits:
        """unsigned[count]. Raises WireError."""
        return decode_values(row.value, old, row.dtype)


def encode_indices(indices: Indices, shape: Shape, span: int) -> bytes:
    """The index block of int32[n] increasing indices below `span`."""
    counts = np.bincount(indices >> shape.block_bits, minlength=shape.num_blocks(span))
    offsets = indices & ((1 << shape.block_bits) - 1)
    header = bytes([shape.block_bits, shape.count_bits, 0, 0])
    return header + _fields(counts, shape.count_bits) + _fields(offsets, shape.block_bits)


def decode_indices(block: Block, count: int, span: int) -> Indices:
    """int32[count], each below `span`; not looked at otherwise. Raises WireError."""
    shape = read_shape(block)
    blocks = shape.num_blocks(span)
    split = HEADER_BYTES + field_bytes(blocks, shape.count_bits)
    stop = split + field_bytes(count, shape.block_bits)
    if len(block) != stop:
        raise TruncatedFrame(f"{count} changes of {span} take {stop} bytes; {len(block)} came")
    counts = _read(block[HEADER_BYTES:split], blocks, shape.count_bits)
    if (total := int(counts.sum())) != count:
        raise InvalidIndices(f"blocks count {total} changes of {count}")
    offsets = _read(block[split:], count, shape.block_bits)
    positions = np.repeat(np.arange(blocks) << shape.block_bits, counts) + offsets
    if positions[-1:].max(initial=0) >= span:
        raise InvalidIndices(f"a position beyond a row of {span} elements")
    return positions.astype(np.int32)


def read_shape(block: Block) -> Shape:
    """The widths that the header of an index block declares. Raises WireError."""
    if len(block) < HEADER_BYTES:
        raise TruncatedFrame(f"an index block of {len(block)} bytes")
    shape, zeros = Shape(int(block[0]), int(block[1])), (int(block[2]), int(block[3]))
    if shape.block_bits not in BLOCK_BITS or zeros != (0, 0):
        raise InvalidTable(f"an index block that begins {block[:HEADER_BYTES].tolist()}")
    if not 1 <= shape.count_bits <= shape.block_bits + 1:
        raise InvalidTable(f"{shape.count_bits} bits count blocks of 2^{shape.block_bits}")
    return shape


def encode_values(new: Bits, old: Bits, dtype: Dtype) -> bytes:
    """The value block of unsigned[n] new and old bits."""
    zigzag = steps.zigzag(new, old, dtype)
    codes = np.full(len(zigzag), AS_IS, np.uint8)
    is_one = (zigzag == 1) | (zigzag == 2)
    codes[is_one] = zigzag[is_one] - 1
    codes[(zigzag >= FIRST_NIBBLE) & (zigzag < FIRST_NIBBLE + 16)] = NIBBLE
    nibbles = zigzag[codes == NIBBLE] - FIRST_NIBBLE
    as_is: bytes = new[codes == AS_IS].astype(unsigned_dtype(dtype)).tobytes()
    padding = bytes(-len(as_is) % WORD_BYTES)
    return _fields(codes, CODE_BITS) + _fields(nibbles, NIBBLE_BITS) + as_is + padding


def decode_values(block: Block, old: Bits, dtype: Dtype) -> Bits:
    """unsigned[n] new bits of elements with old bits. Raises WireError."""
    split = field_bytes(len(old), CODE_BITS)
    if len(block) < split:
        raise TruncatedFrame(f"{len(old)} codes take {split} bytes; {len(block)} came")
    codes = _read(block[:split], len(old), CODE_BITS)
    is_nibble, is_whole = codes == NIBBLE, codes == AS_IS
    num_nibbles, num_whole = int(np.count_nonzero(is_nibble)), int(np.count_nonzero(is_whole))
    second = split + field_bytes(num_nibbles, NIBBLE_BITS)
    if len(block) != (length := value_bytes(len(old), num_nibbles, num_whole, dtype)):
        raise TruncatedFrame(f"values take {length} bytes; {len(block)} came")
    zigzag = (codes + 1).astype(old.dtype)
    zigzag[is_nibble] = _read(block[split:second], num_nibbles, NIBBLE_BITS) + FIRST_NIBBLE
    new = steps.stepped(zigzag, old, dtype)
    wholes = block[second : second + num_whole * dtype.item_size]
    new[is_whole] = np.ascontiguousarray(wholes).view(unsigned_dtype(dtype))
    return new


def field_bytes(count: int, width: int) -> int:
    """What `count` fields of one width take."""
    return -(-count * width // (8 * WORD_BYTES)) * WORD_BYTES


def value_bytes(count: int, nibbles: int, wholes: int, dtype: Dtype) -> int:
    """What a value block takes."""
    fields = field_bytes(count, CODE_BITS) + field_bytes(nibbles, NIBBLE_BITS)
    return fields + field_bytes(wholes, 8 * dtype.item_size)


def _fields(values: NDArray[Any], width: int) -> bytes:
    packed = pack_fields(values.astype(np.uint64), np.full(len(values), width, np.int64))
    return packed + bytes(field_bytes(len(values), width) - len(packed))


def _read(data: Block, count: int, width: int) -> Ints:
    return FieldReader(data).take(np.full(count, width, np.int64)).astype(np.int64)


def _most(indices: Indices, block_bits: int) -> int:
    """The most changes in any block."""
    blocks = indices >> block_bits
    ends = np.concatenate(([-1], np.flatnonzero(blocks[1:] != blocks[:-1]), [len(blocks) - 1]))
    return int((ends[1:] - ends[:-1]).max())
