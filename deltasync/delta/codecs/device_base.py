"""What a codec on a device is: many rows of one dtype in, blocks of bytes out, and back.

The counterpart of `base` for rows that lie on a device. What is made there and what `RowCodec`
makes of the same rows may differ in shape; each end decodes what the other has made. A codec works
on the current stream of the current device, which the caller has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.batched.weights import Numbers
from deltasync.delta.codecs.base import Needs
from deltasync.dtypes import Dtype
from deltasync.errors import WireError
from deltasync.wire.codecs import IndexCodec, ValueCodec

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """Sparse rows of one dtype, whose changes lie one after another on a device.

    Attributes:
        counts: int64[rows], changes of each row, 1 or more.
        spans: int64[rows], elements that each covers, 1 to 2^31 - 1.
        dtype: Of all rows.
        spans_at: int64[rows], the address of the old bits of each row's first element. Those of all
            elements that the row covers lie behind it, side by side; they are only read. None
            unless the codec needs SPAN.
    """

    counts: Ints
    spans: Ints
    dtype: Dtype
    spans_at: Ints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBlocks:
    """Coded rows.

    Attributes:
        index, value: uint8[n] on the device, the rows' blocks side by side.
        index_bytes, value_bytes: int64[rows], how long each block is.
    """

    index: Tensor
    value: Tensor
    index_bytes: Ints
    value_bytes: Ints


class Checks:
    """What is to be looked at once a device has computed it: all of it in one wait.

    What is launched after a check that was put off must be sound whatever that check will find: it
    reads and writes nothing out of bounds.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._looks: list[Callable[[Ints], None]] = []

    def add(self, found: Tensor, look: Callable[[Ints], None]) -> None:
        """Have `look` see int64[n] `found` when `finish` is called. It raises what is wrong."""
        self._found.append(found.reshape(-1))
        self._looks.append(look)

    def take(self, checks: Checks, instead: Callable[[WireError], Exception]) -> None:
        """Have those of `checks` looked at here. What they raise becomes another error."""

        def looked(look: Callable[[Ints], None], found: Ints) -> None:
            try:
                look(found)
            except WireError as error:
                raise instead(error) from error

        self._found += checks._found
        self._looks += [partial(looked, look) for look in checks._looks]

    def finish(self) -> None:
        """Wait for the device once, and look, in the order in which checks were added."""
        if not self._found:
            return
        ends = np.cumsum([len(found) for found in self._found])
        numbers = Numbers(torch.cat(self._found)).read()
        for found, look in zip(np.split(numbers, ends[:-1]), self._looks, strict=True):
            look(found)


class DeviceCodec(Protocol):
    """Codes and decodes rows on a device.

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

    def encode(self, rows: DeviceRows, indices: Tensor, new: Tensor, old: Tensor) -> DeviceBlocks:
        """The blocks of rows. They may have any length: whoever calls sends a row raw if that pays.

        Args:
            rows: What the others are of.
            indices: int32[n], those of each row increasing and below its span.
            new, old: int[n], the bits after and before at the indices.
        """
        ...

    def indices(self, rows: DeviceRows, index: Tensor, index_bytes: Ints, checks: Checks) -> Tensor:
        """int32[n]: the indices of rows, one row after another.

        The caller checks that they increase within the span, when `checks` are finished.

        Args:
            rows: How many there are is at most what the payload has room for.
            index: uint8[bytes], the rows' index blocks side by side: arbitrary bytes. It begins at
                an address that 16 divides.
            index_bytes: int64[rows], how long each block is.
            checks: Where to put off what it takes the device to know.

        Raises:
            WireError: A block is not what `encode` makes of any row. Now, or in `checks`.
        """
        ...

    def values(
        self,
        rows: DeviceRows,
        value: Tensor,
        value_bytes: Ints,
        old: Tensor,
        checks: Checks,
    ) -> Tensor:
        """int[n]: the new bits of rows' changes, one row after another.

        Args:
            rows: As those of `indices`.
            value: uint8[bytes], the rows' value blocks side by side, likewise.
            value_bytes: int64[rows].
            old: int[n], the bits before at the indices.
            checks: Where to put off what it takes the device to know.

        Raises:
            WireError: A block is not what `encode` makes of any row. Now, or in `checks`.
        """
        ...
