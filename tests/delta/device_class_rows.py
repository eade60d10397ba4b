"""Rows that the Triton kernels of `class` code and decode, checked against numpy."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from deltasync.delta.codecs import class_keys, class_positions, class_values, steps
from deltasync.delta.codecs.base import Bits, SparseRow, unsigned_dtype
from deltasync.delta.codecs.bitstream import ByteReader
from deltasync.delta.codecs.class_frequent import Frequent
from deltasync.delta.codecs.classes import ClassCodec
from deltasync.delta.codecs.device_base import Checks, DeviceBlocks, DeviceRows, Ints
from deltasync.delta.codecs.device_class import DeviceClassCodec
from tests.delta.device_rows import joined, old_of, placed


def kept(rows: list[SparseRow]) -> tuple[list[Tensor], Ints]:
    """The old bits of whole rows on the device, to be kept, and where they begin."""
    tensors = [placed(old_of(row)) for row in rows]
    return tensors, np.array([tensor.data_ptr() for tensor in tensors])


def before(rows: list[SparseRow]) -> Tensor:
    """The old bits of what changes."""
    return placed(np.concatenate([old_of(row)[row.indices] for row in rows]))


CODEC = DeviceClassCodec()


def rows_of(rows: list[SparseRow], spans_at: Ints) -> DeviceRows:
    counts, spans = zip(*((len(row.indices), row.span) for row in rows), strict=True)
    return DeviceRows(np.array(counts), np.array(spans), rows[0].dtype, spans_at)


def encoded(rows: list[SparseRow]) -> DeviceBlocks:
    whole, addresses = kept(rows)
    made = CODEC.encode(
        rows_of(rows, addresses),
        joined([row.indices for row in rows]),
        placed(np.concatenate([row.new for row in rows])),
        before(rows),
    )
    del whole
    return made


def decoded_indices(rows: list[SparseRow], blocks: list[bytes]) -> Bits:
    """Once all checks are done: int32[n]."""
    whole, addresses = kept(rows)
    checks, lengths = Checks(), np.array([*map(len, blocks)])
    data = placed(array(b"".join(blocks)))
    found = CODEC.indices(rows_of(rows, addresses), data, lengths, checks)
    checks.finish()
    del whole
    return found.cpu().numpy()


def decoded_values(rows: list[SparseRow], blocks: list[bytes]) -> Bits:
    """Once all checks are done: unsigned[n]."""
    checks, lengths = Checks(), np.array([*map(len, blocks)])
    data, none = placed(array(b"".join(blocks))), np.zeros(len(rows), np.int64)
    found = CODEC.values(rows_of(rows, none), data, lengths, before(rows), checks)
    checks.finish()
    return found.cpu().numpy().view(unsigned_dtype(rows[0].dtype))


def on_host(blocks: Tensor, lengths: Ints) -> list[bytes]:
    """The block of each row."""
    data, stops = bytes(blocks.tolist()), np.cumsum(lengths)
    assert stops[-1] == len(data)
    return [data[stop - size : stop] for stop, size in zip(stops, lengths, strict=True)]


def array(data: bytes) -> Bits:
    return np.frombuffer(data, np.uint8)


def index_block(row: SparseRow, made: bytes) -> bytes:
    """What numpy makes with the classes of a block."""
    reader = ByteReader(array(made))
    lane_bits = reader.varint()
    firsts = class_keys.read_firsts(reader, row.dtype)
    return class_positions.encode(row.indices, old_of(row), row.dtype, lane_bits, firsts)


def value_block(row: SparseRow, made: bytes) -> bytes:
    """What numpy makes with the classes and parameters of a block."""
    reader = ByteReader(array(made))
    firsts = class_keys.read_firsts(reader, row.dtype)
    Frequent.read(reader, row.dtype)
    parameters = np.array([(reader.varint(), reader.varint())[1] for _ in firsts])
    old = old_of(row)[row.indices]
    zigzag = steps.zigzag(row.new, old, row.dtype)
    return class_values.encode(zigzag, old, row.dtype, (firsts, parameters))


def check(rows: list[SparseRow]) -> list[tuple[bytes, bytes]]:
    """Blocks are those of numpy, and rows come back, from those that numpy chooses too."""
    made = encoded(rows)
    index = on_host(made.index, made.index_bytes)
    value = on_host(made.value, made.value_bytes)
    for row, one, other in zip(rows, index, value, strict=True):
        assert one == index_block(row, one)
        assert other == value_block(row, other)
    check_decoding(rows, list(zip(index, value, strict=True)))
    check_decoding(rows, ClassCodec().encode(rows))
    return list(zip(index, value, strict=True))


def check_decoding(rows: list[SparseRow], blocks: list[tuple[bytes, bytes]]) -> None:
    """Blocks of rows are decoded to them."""
    index, value = ([*parts] for parts in zip(*blocks, strict=True))
    found = decoded_indices(rows, index)
    assert np.array_equal(found, np.concatenate([row.indices for row in rows]))
    new = decoded_values(rows, value)
    assert np.array_equal(new, np.concatenate([row.new for row in rows]))
