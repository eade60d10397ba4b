"""Coded payloads: the contract of codecs, and receivers that hold a part. Lies: `worlds.lies`."""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.bits import Flat, Run, torch_dtype
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codecs.decoding import decode_payload
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.dtypes import BY_NAME
from deltasync.errors import (
    ProtocolViolation,
    TruncatedFrame,
    UnknownCodec,
    WireError,
    WrongBase,
)
from deltasync.testing.bits import random_bits
from deltasync.testing.payloads import payloads
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.messages import Bucket, ParameterSpec
from tests.delta.codec_contract import CodecContract, Runs, Specs, assert_same
from tests.worlds.strategies import DTYPES, SEEDS

CODECS = [IndexCodec.GAP, IndexCodec.BLOCK, IndexCodec.CLASS]


def flats_of(specs: Specs, seed: int = 5) -> dict[int, Flat]:
    """The same old weights at both ends."""
    rng = np.random.default_rng(seed)
    return {
        n: Flat.of(random_bits(s.dtype, s.numel, rng).view(torch_dtype(s.dtype)))
        for n, s in enumerate(specs)
    }


def encoded(
    runs: Runs, specs: Specs, codec: IndexCodec, *, compressed: bool = True
) -> tuple[bytes, int, int]:
    """(coded payload, rows, raw bytes)."""
    [(payload, num_rows)] = payloads(runs, specs)
    coded = encode_payload(payload.numpy(), num_rows, LiveOld(specs, flats_of(specs)), codec)
    return coded.to_bytes(compressed=compressed), num_rows, len(payload)


def decoded(
    data: bytes, num_rows: int, raw_bytes: int, specs: Specs, flats: dict[int, Flat] | None = None
) -> NDArray[np.uint8]:
    return decode_payload(
        memoryview(data),
        num_rows,
        raw_bytes,
        LiveOld(specs, flats_of(specs) if flats is None else flats),
        numels=np.array([s.numel for s in specs], np.uint64),
        item_sizes=np.array([s.dtype.item_size for s in specs], np.uint64),
    )


class _Contract(CodecContract):
    """Payloads here begin with the length that `bucket` says that they stand for."""

    codec: ClassVar[IndexCodec]

    def encode(self, runs: Runs, specs: Specs) -> tuple[Tensor, int]:
        data, num_rows, raw_bytes = encoded(runs, specs, self.codec, compressed=False)
        prefixed = bytearray(struct.pack("<Q", raw_bytes) + data)
        return torch.frombuffer(prefixed, dtype=torch.uint8), num_rows

    def decode(self, payload: Tensor, num_rows: int, specs: Specs) -> Runs:
        data = payload.numpy().tobytes()
        if len(data) < 8:
            raise TruncatedFrame("no length")
        raw_bytes = min(struct.unpack("<Q", data[:8])[0], 1 << 30)
        try:
            raw = decoded(data[8:], num_rows, raw_bytes, specs)
        except WrongBase as error:  # damage looks like it
            raise WireError(str(error)) from error
        return BucketReader(specs).read(torch.from_numpy(raw), num_rows)


class TestGap(_Contract):
    codec = IndexCodec.GAP
    golden = (
        "b800000000000000"  # what it stands for
        "a800000000000000a8000000000000000400000000000000"  # lengths of the sections
        "040000000000000013000000000000001300000000000000"
        "000000000102010001000000020002000200000002000100"  # parameters, kinds, codecs
        "010000000000000000000000000000000000000000000000"  # starts
        "050000000000000005000000000000000100000000000000"  # spans
        "030000000000000005000000000000000100000000000000"  # counts
        "040000000000000000000000000000000000000000000000"  # index bytes
        "060000000000000005000000000000000800000000000000"  # value bytes
        "0000000000000000bec0181aeaca7eda0000000000000000"  # digests of old values
        "010001010080c17f0100d9141b7c9dffffffffffffffff"  # index blocks, value blocks
    )


class TestBlock(_Contract):
    codec = IndexCodec.BLOCK
    golden = TestGap.golden  # rows of so few changes go by gaps


class TestClass(_Contract):
    codec = IndexCodec.CLASS
    golden = (
        "b800000000000000"  # what it stands for
        "a800000000000000a8000000000000000600000000000000"  # lengths of the sections
        "060000000000000019000000000000001900000000000000"
        "000000000104030001000000020002000200000002000100"  # parameters, kinds, codecs
        "010000000000000000000000000000000000000000000000"  # starts
        "050000000000000005000000000000000100000000000000"  # spans
        "030000000000000005000000000000000100000000000000"  # counts
        "060000000000000000000000000000000000000000000000"  # index bytes
        "0c0000000000000005000000000000000800000000000000"  # value bytes
        "d90c1b2151c3998dbec0181aeaca7eda0000000000000000"  # digests of old values
        "12010300010a0100020e0104050dfffebe1fd9141b7c9dffffffffffffffff"  # index and value blocks
    )


def near(specs: Specs, density: float, seed: int) -> Runs:
    """One sparse run of each parameter, whose values moved by a few steps."""
    rng, runs = np.random.default_rng(seed), list[tuple[int, Run]]()
    for number, flat in flats_of(specs).items():
        count = max(1, int(flat.numel * density))
        where = np.sort(rng.choice(flat.numel, count, replace=False)).astype(np.int32)
        old = flat.line.numpy()[where]
        new = (old + rng.integers(-2, 3, count).astype(old.dtype)).astype(old.dtype)
        runs.append((number, Run(0, flat.numel, torch.from_numpy(where), torch.from_numpy(new))))
    return runs


def one_spec(dtype: str = "bfloat16", numel: int = 5000) -> Specs:
    return (ParameterSpec(("a",), (numel,), BY_NAME[dtype]),)


@pytest.mark.parametrize("codec", CODECS)
@given(dtype=DTYPES, density=st.floats(0, 1), seed=SEEDS, compressed=st.booleans())
def test_small_changes_of_any_dtype_come_back(
    codec: IndexCodec, dtype: Any, density: float, seed: int, compressed: bool
) -> None:
    specs = one_spec(dtype.name, 3000)
    runs = near(specs, density, seed)
    data, num_rows, raw_bytes = encoded(runs, specs, codec, compressed=compressed)
    raw = torch.from_numpy(decoded(data, num_rows, raw_bytes, specs))
    assert_same(BucketReader(specs).read(raw, num_rows), runs, specs)
    [(payload, _)] = payloads(runs, specs)
    table = num_rows * 48
    assert torch.equal(raw[:table], payload[:table])
    assert len(data) <= raw_bytes + 64 * (num_rows + 1)


class Half:
    """A parameter of which a receiver holds the first elements."""

    def __init__(self, inner: Flat, kept: int) -> None:
        self.inner, self.kept = inner, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def held(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, min(stop, max(start, self.kept)))

    def keeps(self, positions: Tensor) -> Tensor:
        return positions < self.kept

    def read(self, start: int, stop: int) -> Tensor:
        return self.inner.read(start, min(stop, max(start, self.kept)))


@pytest.mark.parametrize("codec", [IndexCodec.GAP, IndexCodec.BLOCK])
def test_who_holds_a_part_decodes_that_part(codec: IndexCodec) -> None:
    specs = one_spec()
    runs = near(specs, 0.02, 3)
    data, num_rows, raw_bytes = encoded(runs, specs, codec)
    parts: dict[int, Any] = {0: Half(flats_of(specs)[0], 2000)}
    parts[0].inner.line[2000:] = 0
    raw = torch.from_numpy(decoded(data, num_rows, raw_bytes, specs, parts))
    [(_, found)], [(_, sent)] = BucketReader(specs).read(raw, num_rows), runs
    assert found.indices is not None
    assert sent.indices is not None
    assert found.bits is not None
    assert sent.bits is not None
    assert torch.equal(found.indices, sent.indices)
    mine = found.indices < 2000
    assert torch.equal(found.bits[mine], sent.bits[mine])


def test_class_is_refused_by_who_holds_a_part() -> None:
    specs = one_spec()
    data, num_rows, raw_bytes = encoded(near(specs, 0.02, 3), specs, IndexCodec.CLASS)
    parts: dict[int, Any] = {0: Half(flats_of(specs)[0], 2000)}
    with pytest.raises(ProtocolViolation, match="gap"):
        decoded(data, num_rows, raw_bytes, specs, parts)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_held_needs_no_old_values(codec: IndexCodec) -> None:
    specs = one_spec()
    data, num_rows, raw_bytes = encoded(near(specs, 0.02, 3), specs, codec)
    raw = torch.from_numpy(decoded(data, num_rows, raw_bytes, specs, {}))
    assert len(BucketReader(specs).read(raw, num_rows)) == num_rows


def test_a_reader_without_weights_says_so() -> None:
    specs = one_spec()
    data, num_rows, raw_bytes = encoded(near(specs, 0.02, 3), specs, IndexCodec.GAP)
    sizes = {"num_rows": num_rows, "raw_bytes": raw_bytes}
    message = Bucket(version=2, sequence=0, compression="coded", **sizes)  # type: ignore[arg-type]
    with pytest.raises(UnknownCodec, match="needs the weights"):
        BucketReader(specs).unpack(message, torch.frombuffer(bytearray(data), dtype=torch.uint8))
