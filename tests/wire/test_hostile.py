"""Bytes from anyone: a typed error or a right reading, and never more memory than was declared."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from deltasync.delta.bucket import BucketReader
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltasync import dtypes
from deltasync.errors import LimitExceeded, MalformedMessage, WireError
from deltasync.wire import messages as m
from deltasync.wire.compression import compress, decompress
from deltasync.wire.frame import decode, encode
from deltasync.wire.table import MAX_SPARSE_SPAN, ROW
from tests.golden.make_golden import FOLDER, MESSAGES
from tests.wire import reference, strategies
from tests.worlds.payloads import payloads

FIELDS = ROW.names or ()
WIDTHS = {name: 8 * ROW[name].itemsize for name in FIELDS}
SLACK = 1 << 17
"""Bytes of Python objects that any call may take: errors, tracebacks, small arrays."""


def peak_of(call: Callable[[], object]) -> int:
    """Bytes allocated at the peak of `call`, which may raise WireError and nothing else."""
    tracemalloc.start()
    try:
        call()
    except WireError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


# Messages


@pytest.mark.parametrize("name", MESSAGES)
def test_a_damaged_header_is_refused(name: str) -> None:
    """Each flipped bit, each end that is missing, and what comes behind."""
    data = (FOLDER / f"{name}.bin").read_bytes()
    wrong = [data[:at] for at in range(len(data))] + [data + b"\0", data * 2]
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        wrong.append(bytes(damaged))
    for one in wrong:
        with pytest.raises(WireError):
            decode(one)


PREFIXES = [b"", b"DSYN", b"DSYN\1\0\0\0", b"DSYN" + struct.pack("<HHI", 1, 0, 1 << 20)]


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@given(st.sampled_from(PREFIXES), st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_any_bytes_as_a_header_or_a_message(prefix: bytes, data: bytes, payload_bytes: int) -> None:
    assert peak_of(lambda: decode(prefix + data)) < SLACK
    header = reference.header(data, payload_bytes=payload_bytes)
    assert peak_of(lambda: decode(header)) < SLACK


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner),
    max_leaves=10,
)


@given(st.sampled_from(sorted(MESSAGES)), json_values, st.data())
def test_any_value_of_any_member(name: str, value: Any, data: st.DataObject) -> None:
    """What is read is a message that says the same again; all else is refused."""
    members = dict(MESSAGES[name])
    members[data.draw(st.sampled_from(sorted(members)))] = value
    header = reference.header(json.dumps(members).encode())
    try:
        read, payload_bytes = decode(header)
    except WireError:
        return
    assert decode(encode(read, payload_bytes=payload_bytes)) == (read, payload_bytes)


MANY = 100_000
LONG_LISTS = {
    "numbers for engines": ("welcome", "full_sync", b"1," * MANY + b"1"),
    "nothing for parameters": ("layout", "parameters", b"[]," * MANY + b"[]"),
}
LONG_TEXTS = {
    name: json.dumps(MESSAGES[kind] | {member: ["HERE"]}).encode().replace(b'"HERE"', text)
    for name, (kind, member, text) in LONG_LISTS.items()
}
LONG_TEXTS["extra members"] = (
    b'{"kind":"commit","version":1' + b"".join(b',"%x":1' % i for i in range(MANY)) + b"}"
)
LONG_TEXTS["depth"] = b'{"kind":"commit","version":' + b"[" * MANY + b"}"


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS.keys())
def test_reporting_many_faults_takes_memory_in_proportion(text: bytes) -> None:
    header = reference.header(text)
    with pytest.raises(MalformedMessage) as raised:
        decode(header)
    assert len(str(raised.value)) < 200
    cause = raised.value.__cause__
    assert isinstance(cause, ValidationError)
    if text != LONG_TEXTS["extra members"]:
        assert cause.error_count() <= 3, "a list stops at its first fault"
    assert peak_of(lambda: decode(header)) < 8 * len(header) + SLACK


# Compression


@given(st.binary(max_size=400), st.integers(0, 2**63 - 1), st.data())
def test_any_bytes_to_decompress(raw: bytes, raw_bytes: int, data: st.DataObject) -> None:
    """Damaged frames are refused, or as long as they declare."""
    for made in (raw, b"\x28\xb5\x2f\xfd" + raw):
        call = partial(decompress, made, compression="zstd", raw_bytes=raw_bytes)
        assert peak_of(call) < SLACK
    frame = bytearray(compress(raw))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        inflated = decompress(bytes(frame), compression="zstd", raw_bytes=len(raw))
    except WireError:
        return
    assert len(inflated) == len(raw)


BOMB_BYTES = 256 << 20


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A small frame that inflates to 256 MiB, made of pieces to spare this process's memory."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=BOMB_BYTES)
    piece = bytes(1 << 20)
    parts = [compressor.compress(piece) for _ in range(BOMB_BYTES >> 20)]
    return b"".join([*parts, compressor.flush()])


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
def test_a_bomb_is_refused_before_it_inflates(bomb: bytes) -> None:
    """One that says its size, one that lies about it, and one that does not say it."""
    assert len(bomb) < 1 << 16
    assert zstandard.frame_content_size(bomb) == BOMB_BYTES
    size_at = bomb.index(struct.pack("<I", BOMB_BYTES))
    lying = bomb[:size_at] + struct.pack("<I", 1000) + bomb[size_at + 4 :]
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    for frame, raw_bytes, error in [
        (bomb, 1000, LimitExceeded),
        (lying, 1000, WireError),
        (silent, 1000, LimitExceeded),
        (silent, BOMB_BYTES, LimitExceeded),
    ]:
        call = partial(decompress, frame, compression="zstd", raw_bytes=raw_bytes)
        with pytest.raises(error):
            call()
        assert peak_of(call) < SLACK


# Patch tables


def check_rows(rows: Any, payload_bytes: int, specs: tuple[m.ParameterSpec, ...]) -> None:
    """The bounds of section 3 in plain integers, blocks walked one by one."""
    before, at = (0, 0), len(rows) * ROW.itemsize
    end = at
    for row in rows.tolist():
        parameter, kind, index_codec, value_codec, reserved, start, span, count, *lengths = row
        spec = specs[parameter]
        assert (parameter, start) >= before
        assert span >= 1
        assert start + span <= spec.numel
        assert 1 <= count <= span
        assert (kind, index_codec) in {(1, 1), (2, 0)}
        assert (value_codec, reserved) == (1, 0)
        assert span <= MAX_SPARSE_SPAN if kind == 1 else count == span
        assert lengths == [4 * count if kind == 1 else 0, spec.dtype.item_size * count]
        for length in lengths:
            end = at + length if length else end
            at += -(-length // 8) * 8
        before = (parameter, start + span)
    assert end == payload_bytes


@st.composite
def packed(draw: strategies.Draw) -> tuple[tuple[m.ParameterSpec, ...], bytearray, int]:
    """A layout, a right payload of one row or more, and the number of its rows."""
    specs = draw(strategies.layouts(max_numel=200).filter(lambda s: any(p.numel for p in s)))
    pairs = draw(strategies.runs(specs).filter(bool))
    [(payload, _)] = payloads(pairs, specs)
    return specs, bytearray(payload.numpy().tobytes()), len(pairs)


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@given(packed(), st.integers(0, 3), st.data())
def test_tables_are_read_and_lying_ones_refused_or_within_bounds(
    case: tuple[tuple[m.ParameterSpec, ...], bytearray, int], lies: int, data: st.DataObject
) -> None:
    specs, payload, num_rows = case
    table = np.frombuffer(payload, ROW, num_rows)
    for _ in range(lies):
        field = data.draw(st.sampled_from(FIELDS))
        row = data.draw(st.integers(0, num_rows - 1))
        value, top = int(table[field][row]), 2 ** WIDTHS[field] - 1
        near = st.sampled_from([(value + step) & top for step in range(-9, 10)])
        table[field][row] = data.draw(near | st.integers(0, top))
    try:
        runs = BucketReader(specs).read(torch.frombuffer(payload, dtype=torch.uint8), num_rows)
    except WireError:
        assert lies
        return
    check_rows(table, len(payload), specs)
    assert [run.count for _, run in runs] == table["count"].tolist()


@given(
    st.binary(max_size=300) | st.integers(0, 6).map(lambda n: bytes([0] * 4 + [1, 1, 1, 0]) * n),
    st.integers(1, 2**32 - 1),
)
@example(
    # Eight rows of 2^61 elements of 8 bytes add up to 0 modulo 2^64.
    reference.payload(
        [(0, 2, 0, 1, 0, k << 58, 1 << 58, 1 << 58, 0, 1 << 61) for k in range(8)],
        [(b"", b"")] * 8,
    ),
    8,
)
def test_any_payload_with_any_number_of_rows(data: bytes, num_rows: int) -> None:
    payload = torch.tensor(list(data), dtype=torch.uint8)
    for numel in (1000, 2**62):
        specs = (m.ParameterSpec(("a",), (numel,), dtypes.BY_NAME["int64"]),)
        assert peak_of(partial(BucketReader(specs).read, payload, num_rows)) < SLACK
