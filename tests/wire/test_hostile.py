"""Bytes from anyone: a typed error or a right reading, and never more memory than was declared."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltasync import dtypes
from deltasync.delta.bits import Run
from deltasync.delta.bucket import BucketReader
from deltasync.errors import LimitExceeded, MalformedMessage, WireError
from deltasync.testing.payloads import payloads
from deltasync.wire import messages as m
from deltasync.wire.compression import compress, decompress
from deltasync.wire.frame import decode, encode
from deltasync.wire.table import MAX_SPARSE_SPAN, ROW, read_table
from tests.golden.make_golden import FOLDER, MESSAGES
from tests.wire import reference, strategies

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


@given(strategies.messages)
def test_messages_survive_the_wire(message: m.Message) -> None:
    payload_bytes = strategies.payload_bytes_of(message)
    header = encode(message, payload_bytes=payload_bytes)
    assert decode(header) == (message, payload_bytes)


def test_every_kind_has_a_strategy() -> None:
    assert set(strategies.MESSAGES) == {message["kind"] for message in MESSAGES.values()} | {
        "bucket"
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_every_flipped_bit_of_a_header_is_refused(name: str) -> None:
    data = (FOLDER / f"{name}.bin").read_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(bytes(damaged))


@given(strategies.messages, st.data())
def test_a_damaged_byte_is_refused(message: m.Message, data: st.DataObject) -> None:
    header = bytearray(encode(message, payload_bytes=strategies.payload_bytes_of(message)))
    header[data.draw(st.integers(0, len(header) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        decode(bytes(header))


@given(strategies.messages, st.data(), st.binary(min_size=1, max_size=40))
def test_truncation_and_extension_are_refused(
    message: m.Message, data: st.DataObject, more: bytes
) -> None:
    header = encode(message, payload_bytes=strategies.payload_bytes_of(message))
    for wrong in (header[: data.draw(st.integers(0, len(header) - 1))], header + more):
        with pytest.raises(WireError):
            decode(wrong)


PREFIXES = st.sampled_from(
    [b"", b"DSYN", b"DSYN\1\0\0\0", b"DSYN" + struct.pack("<HHI", 1, 0, 1 << 20)]
)


@given(PREFIXES, st.binary(max_size=300))
def test_any_bytes_as_a_header(prefix: bytes, data: bytes) -> None:
    assert peak_of(lambda: decode(prefix + data)) < SLACK


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | strategies.texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strategies.names, inner),
    max_leaves=10,
)


@given(strategies.messages, json_values, st.data())
def test_any_value_of_any_member(message: m.Message, value: Any, data: st.DataObject) -> None:
    """What is read is a message that says the same again; all else is refused."""
    members = message.model_dump(mode="json")
    members[data.draw(st.sampled_from(sorted(members)))] = value
    header = reference.header(json.dumps(members).encode())
    try:
        read, payload_bytes = decode(header)
    except WireError:
        return
    assert decode(encode(read, payload_bytes=payload_bytes)) == (read, payload_bytes)


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_bytes_as_a_message(data: bytes, payload_bytes: int) -> None:
    header = reference.header(data, payload_bytes=payload_bytes)
    assert peak_of(lambda: decode(header)) < SLACK


MANY = 100_000
LONG_LISTS = {
    "numbers for engines": ("welcome", "full_sync", b"1," * MANY + b"1"),
    "numbers for names": ("layout", "parameters", b"[[" + b"1," * MANY + b"1],[],1]"),
    "negative dimensions": ("layout", "parameters", b'[["a"],[' + b"-1," * MANY + b"1],1]"),
    "nothing for parameters": ("layout", "parameters", b"[]," * MANY + b"[]"),
    "texts for versions": ("hello", "format_versions", b'"",' * MANY + b"1"),
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


@given(st.binary(max_size=200), st.integers(0, 2**63 - 1), st.booleans())
def test_any_bytes_to_decompress(data: bytes, raw_bytes: int, looks_real: bool) -> None:
    data = b"\x28\xb5\x2f\xfd" + data if looks_real else data
    assert peak_of(lambda: decompress(data, compression="zstd", raw_bytes=raw_bytes)) < SLACK


@given(st.binary(max_size=400), st.data())
def test_a_damaged_zstd_frame_is_refused_or_as_long_as_declared(
    raw: bytes, data: st.DataObject
) -> None:
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
    assert len(bomb) < 1 << 16
    assert zstandard.frame_content_size(bomb) == BOMB_BYTES
    with pytest.raises(LimitExceeded, match="1000 were declared"):
        decompress(bomb, compression="zstd", raw_bytes=1000)
    assert peak_of(lambda: decompress(bomb, compression="zstd", raw_bytes=1000)) < SLACK


def test_a_bomb_whose_frame_lies_about_its_size_is_refused(bomb: bytes) -> None:
    size_at = bomb.index(struct.pack("<I", BOMB_BYTES))
    lying = bomb[:size_at] + struct.pack("<I", 1000) + bomb[size_at + 4 :]
    assert zstandard.frame_content_size(lying) == 1000
    with pytest.raises(WireError):
        decompress(lying, compression="zstd", raw_bytes=1000)
    assert peak_of(lambda: decompress(lying, compression="zstd", raw_bytes=1000)) < SLACK


@pytest.mark.parametrize("raw_bytes", [1000, BOMB_BYTES])
def test_a_bomb_that_does_not_say_its_size_is_refused(raw_bytes: int) -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(LimitExceeded, match="does not say"):
        decompress(frame, compression="zstd", raw_bytes=raw_bytes)
    assert peak_of(lambda: decompress(frame, compression="zstd", raw_bytes=raw_bytes)) < SLACK


@pytest.mark.parametrize("more", [b"\0", b"garbage", compress(b"a" * 1000), compress(b"")])
def test_bytes_behind_the_frame_are_refused(more: bytes) -> None:
    with pytest.raises(WireError):
        decompress(compress(b"a" * 1000) + more, compression="zstd", raw_bytes=1000)


# Patch tables


def pack(pairs: list[tuple[int, Run]], specs: tuple[m.ParameterSpec, ...]) -> bytes:
    """All of `pairs` as one payload, its table first."""
    [(payload, _)] = payloads(pairs, specs)
    return payload.numpy().tobytes()


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
    pairs = draw(strategies.runs(specs))
    if not pairs:
        parameter = next(i for i, spec in enumerate(specs) if spec.numel)
        rng = np.random.default_rng(0)
        numel = specs[parameter].numel
        run = strategies.make_run(rng, specs[parameter], 0, numel, numel, dense=False)
        pairs = [(parameter, run)]
    return specs, bytearray(pack(pairs, specs)), len(pairs)


@given(packed())
def test_right_tables_are_read(case: tuple[tuple[m.ParameterSpec, ...], bytearray, int]) -> None:
    specs, payload, num_rows = case
    numels, item_sizes = strategies.numels_and_item_sizes(specs)
    rows, _, _ = read_table(
        np.frombuffer(payload, np.uint8)[: num_rows * ROW.itemsize],
        payload_bytes=len(payload),
        numels=numels,
        item_sizes=item_sizes,
    )
    assert len(rows) == num_rows
    check_rows(rows, len(payload), specs)


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@given(packed(), st.data())
def test_lying_tables_are_refused_or_within_bounds(
    case: tuple[tuple[m.ParameterSpec, ...], bytearray, int], data: st.DataObject
) -> None:
    specs, payload, num_rows = case
    numels, item_sizes = strategies.numels_and_item_sizes(specs)
    table = np.frombuffer(payload, ROW, num_rows)
    for _ in range(data.draw(st.integers(1, 3))):
        field = data.draw(st.sampled_from(FIELDS))
        row = data.draw(st.integers(0, num_rows - 1))
        value, top = int(table[field][row]), 2 ** WIDTHS[field] - 1
        near = st.sampled_from([(value + step) & top for step in range(-9, 10)])
        table[field][row] = data.draw(near | st.integers(0, top))
    try:
        rows, _, _ = read_table(
            table.view(np.uint8),
            payload_bytes=len(payload),
            numels=numels,
            item_sizes=item_sizes,
        )
        runs = BucketReader(specs).read(torch.frombuffer(payload, dtype=torch.uint8), num_rows)
    except WireError:
        return
    check_rows(rows, len(payload), specs)
    assert [run.count for _, run in runs] == rows["count"].tolist()


@given(st.binary(max_size=300), st.integers(0, 2**40), st.integers(0, 5))
def test_any_bytes_as_a_table(data: bytes, payload_bytes: int, num_parameters: int) -> None:
    numels = np.array([2**62, 5, 0, 2**31, 100][:num_parameters], np.uint64)
    sizes = np.array([8, 1, 2, 4, 2][:num_parameters], np.uint64)

    def call() -> object:
        table = np.frombuffer(data, np.uint8)
        return read_table(table, payload_bytes=payload_bytes, numels=numels, item_sizes=sizes)

    assert peak_of(call) < SLACK


@given(
    st.binary(max_size=300) | st.integers(0, 6).map(lambda n: bytes([0] * 4 + [1, 1, 1, 0]) * n),
    st.integers(1, 2**32 - 1),
)
def test_any_payload_with_any_number_of_rows(data: bytes, num_rows: int) -> None:
    specs = (m.ParameterSpec(("a",), (1000,), dtypes.BY_NAME["float32"]),)
    payload = torch.tensor(list(data), dtype=torch.uint8)
    assert peak_of(lambda: BucketReader(specs).read(payload, num_rows)) < SLACK


def test_lengths_whose_sum_wraps_are_refused() -> None:
    """Eight rows of 2^61 elements of 8 bytes add up to 0 modulo 2^64."""
    rows = [(0, 2, 0, 1, 0, k << 58, 1 << 58, 1 << 58, 0, 1 << 61) for k in range(8)]
    payload = reference.payload(rows, [(b"", b"")] * 8)
    specs = (m.ParameterSpec(("a",), (2**62,), dtypes.BY_NAME["int64"]),)
    with pytest.raises(WireError):
        BucketReader(specs).read(torch.tensor(list(payload), dtype=torch.uint8), 8)
