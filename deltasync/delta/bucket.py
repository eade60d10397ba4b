"""Payloads taken apart: the rows of a bucket as views, within every bound of the wire format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Live, Run, integer_dtype
from deltasync.delta.codecs.decoding import Decoder, decode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.errors import LimitExceeded
from deltasync.wire.compression import decompress
from deltasync.wire.messages import Bucket, ParameterSpec
from deltasync.wire.table import ALIGNMENT, ROW, RowKind, Rows, read_table

Where: TypeAlias = slice | NDArray[np.bool_]

MIN_BUCKET_BYTES = 256
"""A row, an index and a value with their padding, and some."""

_POSITION_BYTES = 8


def staged_bytes_of(
    *, sparse_bytes: int, dense_bytes: int, part_item_size: int | None = None
) -> int:
    """Memory that staging takes for what a begin declares.

    Positions are int64 where indices are int32, and new values are kept beside old ones: twice
    what travels. What is dense has no positions, unless only parts of it are held.

    Args:
        sparse_bytes, dense_bytes: Of indices and values.
        part_item_size: The smallest element of those held in part; None if all are held whole.
    """
    positions = 0 if part_item_size is None else _POSITION_BYTES // part_item_size
    return 2 * sparse_bytes + (2 + positions) * dense_bytes


@dataclass(frozen=True, slots=True)
class ReadBucket:
    """One payload whose table was checked. Its indices were not looked at.

    Attributes:
        rows: The patch table.
        index_at, value_at: int64[rows], where indices and values begin, in bytes.
        payload: uint8[n]; not owned.
    """

    specs: tuple[ParameterSpec, ...]
    rows: Rows
    index_at: NDArray[np.int64]
    value_at: NDArray[np.int64]
    payload: Tensor

    def runs(self, where: Where = slice(None)) -> Iterator[tuple[int, Run]]:
        """(parameter, run) of each row, or of those that `where` selects: views of the payload."""
        columns = self.rows[where], self.index_at[where], self.value_at[where]
        for row, index, value in zip(*(column.tolist() for column in columns), strict=True):
            parameter, kind, _, _, _, start, span, _, index_bytes, value_bytes = row
            dtype = integer_dtype(self.specs[parameter].dtype)
            bits = self.payload[value : value + value_bytes].view(dtype)
            indices = None
            if kind == RowKind.SPARSE:
                indices = self.payload[index : index + index_bytes].view(torch.int32)
            yield parameter, Run(start, span, indices, bits)


class BucketReader:
    """Takes the buckets of a sync apart, in order, checking each bound of the wire format.

    Args:
        specs: The layout.
        lanes: Connections on which buckets come. Those of each have an order of their own.
        flats: The weights by parameter, by which coded payloads are decoded: as they are before
            the payload is applied. None to refuse coded payloads. Not owned.
        decoder: What decodes where these weights are; None for the host.

    Attributes:
        reached: (parameter, flat position) up to which buckets of this sync have come, by lane.
    """

    def __init__(
        self,
        specs: tuple[ParameterSpec, ...],
        lanes: int = 1,
        flats: Mapping[int, Live] | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self._specs, self._lanes, self._decoder = specs, lanes, decoder
        self._old = None if flats is None else LiveOld(specs, flats)
        self._numels = np.array([spec.numel for spec in specs], np.uint64)
        self._item_sizes = np.array([spec.dtype.item_size for spec in specs], np.uint64)
        self.begin()

    def begin(self, num_bytes: int | None = None) -> None:
        """A new sync begins.

        Args:
            num_bytes: The indices and values that it declares, on all lanes; None for no bound. A
                row takes some of it, so that buckets are bounded too.
        """
        self.reached, self._left = [(0, 0)] * self._lanes, num_bytes

    def unpack(self, bucket: Bucket, payload: Tensor | None, *, lane: int = 0) -> ReadBucket:
        """Check the table of a payload as it came, compressed, coded or not.

        Raises:
            WireError: A rule of the wire format is broken.
            WrongBase, ProtocolViolation: It cannot be decoded by the weights held.
        """
        if bucket.compression == "coded" and self._decoder is not None and payload is not None:
            found = self._decoder.decode(
                payload,
                bucket.num_rows,
                bucket.raw_bytes,
                numels=self._numels,
                item_sizes=self._item_sizes,
                after=self.reached[lane],
            )
            if found is not None:
                self._count(found.rows, lane)
                table = found.rows, found.index_at, found.value_at
                return ReadBucket(self._specs, *table, found.payload)
        return self.open(self._raw(bucket, payload), bucket.num_rows, lane=lane)

    def _raw(self, bucket: Bucket, payload: Tensor | None) -> Tensor:
        if bucket.compression != "coded" or self._old is None or payload is None:
            return inflated(bucket, payload)
        found = decode_payload(
            payload.cpu().numpy().data,
            bucket.num_rows,
            bucket.raw_bytes,
            self._old,
            numels=self._numels,
            item_sizes=self._item_sizes,
        )
        return torch.from_numpy(found)

    def open(self, payload: Tensor, num_rows: int, *, lane: int = 0) -> ReadBucket:
        """Check the table of uint8[n] `payload`. Raises WireError."""
        if payload.data_ptr() % ALIGNMENT:
            payload = payload.clone()
        table = payload[: num_rows * ROW.itemsize].cpu().numpy()
        rows, index_at, value_at = read_table(
            table,
            payload_bytes=len(payload),
            numels=self._numels,
            item_sizes=self._item_sizes,
            after=self.reached[lane],
        )
        self._count(rows, lane)
        return ReadBucket(self._specs, rows, index_at, value_at, payload)

    def _count(self, rows: Rows, lane: int) -> None:
        if self._left is not None:
            self._left -= int(rows["index_bytes"].sum() + rows["value_bytes"].sum())
            if self._left < 0:
                raise LimitExceeded(
                    f"the sync is {-self._left} bytes larger than its begin declared: begin must "
                    "count the indices and values of all buckets"
                )
        last = rows[-1]
        self.reached[lane] = int(last["parameter"]), int(last["start"] + last["span"])

    def read(self, payload: Tensor, num_rows: int) -> list[tuple[int, Run]]:
        """(parameter, run) of each row. Raises WireError."""
        return list(self.open(payload, num_rows).runs())


def inflated(bucket: Bucket, payload: Tensor | None) -> Tensor:
    """uint8[raw_bytes]: a payload as it was packed, unless it is coded. Raises WireError."""
    if payload is None:
        payload = torch.empty(0, dtype=torch.uint8, device="cpu")
    if bucket.compression == "none":
        return payload
    sent = payload.cpu().numpy().data
    data = decompress(sent, compression=bucket.compression, raw_bytes=bucket.raw_bytes)
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
