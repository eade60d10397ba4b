"""What a codec is: rows of a bucket in, blocks of bytes out, and back.

docs/wire-format.md, section 4. Codecs work on numpy arrays in host memory. They never see a
parameter's number, a payload or a connection: `encoding` and `decoding` put rows and payloads
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.dtypes import Dtype
from deltasync.wire.codecs import IndexCodec, ValueCodec

Bits: TypeAlias = NDArray[Any]
"""unsigned[n] (uint8, uint16, uint32 or uint64, by the item size): the bits of n elements."""

Indices: TypeAlias = NDArray[np.int32]
Block: TypeAlias = NDArray[np.uint8]


class Needs(Enum):
    """Which old bits of a row its decoding needs."""

    CHANGED = "changed"  # those of the elements that the row changes
    SPAN = "span"  # those of all elements that the row covers


@dataclass(frozen=True, slots=True, eq=False)
class SparseRow:
    """One sparse row of a bucket, to be encoded. Arrays are not owned, and only read.

    Attributes:
        indices: int32[count], strictly increasing, at least 0 and less than `span`.
        new: unsigned[count], the new bits.
        old: The bits before: unsigned[count] if the codec needs CHANGED, unsigned[span] if SPAN.
        span: Elements that the row covers, 1 to 2^31 - 1.
        dtype: Of the parameter.
    """

    indices: Indices
    new: Bits
    old: Bits
    span: int
    dtype: Dtype


@dataclass(frozen=True, slots=True, eq=False)
class CodedRow:
    """One sparse row to be decoded. Its blocks hold arbitrary bytes; the numbers were checked.

    Attributes:
        index, value: uint8[n], the blocks. Views, at any alignment; not owned, and only read.
        count: Elements that the row changes, 1 to `span`.
        span: Elements that the row covers, 1 to 2^31 - 1.
        dtype: Of the parameter.
        old: unsigned[span], the old bits of what the row covers if its codec needs SPAN, otherwise
            None.
    """

    index: Block
    value: Block
    count: int
    span: int
    dtype: Dtype
    old: Bits | None = None


class RowCodec(Protocol):
    """Turns a row into two blocks of bytes, and blocks into a row.

    Attributes:
        index_codec, value_codec: Its ids on the wire.
        needs: The old bits that decoding needs.
    """

    @property
    def index_codec(self) -> IndexCodec: ...

    @property
    def value_codec(self) -> ValueCodec: ...

    @property
    def needs(self) -> Needs: ...

    def encode(self, row: SparseRow) -> tuple[bytes, bytes]:
        """(index block, value block) of a row.

        A row for which the codec does not pay may have blocks of any length: the caller sends a
        row raw if its blocks are longer than its int32 indices and its values.
        """
        ...

    def indices(self, row: CodedRow) -> Indices:
        """int32[count], from the index block.

        The caller checks that they increase strictly within the span. `count` may be up to `span`
        whatever the length of the block: compare the two before memory is taken.

        Raises:
            WireError: A block is not what `encode` makes of any row. Never another error.
        """
        ...

    def values(self, row: CodedRow, old: Bits) -> Bits:
        """unsigned[count] new bits, absolute.

        Args:
            row: The same as that of `indices`.
            old: unsigned[count] old bits at the indices.

        Raises:
            WireError: A block is not what `encode` makes of any row. Never another error.
        """
        ...


@cache
def unsigned_dtype(dtype: Dtype) -> np.dtype[Any]:
    """The numpy type that carries the bits of `dtype`."""
    return np.dtype(f"<u{dtype.item_size}")
