"""Bytes from anyone: a typed error or a right reading, and never more memory than was declared."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltasync import dtypes
from deltasync.delta.bits import Flat, torch_dtype
from deltasync.delta.changes import Changes
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.shard import whole
from deltasync.delta.staging import LiveWeights, Received
from deltasync.delta.tiles import Space, space_of, table_of
from deltasync.errors import LimitExceeded, MalformedMessage, WireError
from deltasync.wire import messages as m
from deltasync.wire.changes import Sizes
from deltasync.wire.compression import compress, decompress
from deltasync.wire.frame import decode
from deltasync.wire.shares import SHARE
from tests.golden.make_golden import MESSAGES
from tests.wire import reference, strategies
from tests.wire.reference import Tile

NUMBERS = ["item_size", "tiles", "places", "whole"]
PACKERS: list[Callable[[bytes], bytes]] = [bytes, compress]
"""Of a stream that is stored, or packed."""
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


PREFIXES = [b"", b"DSYN", b"DSYN\2\0\0\0", b"DSYN" + struct.pack("<HHI", 2, 0, 1 << 20)]


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@given(st.sampled_from(PREFIXES), st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_any_bytes_as_a_header_or_a_message(prefix: bytes, data: bytes, payload_bytes: int) -> None:
    assert peak_of(lambda: decode(prefix + data)) < SLACK
    header = reference.header(data, payload_bytes=payload_bytes)
    assert peak_of(lambda: decode(header)) < SLACK


MANY = 100_000
LONG_TEXTS = {
    "a list": b'{"kind":"welcome","full_sync":[' + b"1," * MANY + b"1]}",
    "extra members": b'{"kind":"commit","version":1'
    + b"".join(b',"%x":1' % i for i in range(MANY))
    + b"}",
    "depth": b'{"kind":"commit","version":' + b"[" * MANY + b"}",
}


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


# Changes


@dataclass(frozen=True)
class Sent:
    """Changes on their way, and the weights that they are for.

    Attributes:
        space: What the lane carries.
        live: The weights, all of them.
        numbers: What the message says.
        payload: As it travels.
    """

    space: Space
    live: LiveWeights
    numbers: dict[str, Any]
    payload: bytes

    def read(self, reader: PayloadReader) -> Received:
        """As a receiver does it. Raises WireError."""
        message = {"kind": "bucket", "version": 1, "sequence": 0, **self.numbers}
        header = reference.header(json.dumps(message).encode(), payload_bytes=len(self.payload))
        bucket, _ = decode(header, max_payload_bytes=1 << 20, arrived_bytes=len(self.payload))
        assert isinstance(bucket, m.Bucket)
        payload = torch.from_numpy(np.frombuffer(self.payload, np.uint8).copy())
        return reader.read(bucket, payload if len(payload) else None)

    def reader(self) -> PayloadReader:
        reader = PayloadReader(self.live)
        if self.space.given != self.live.space.given:
            reader.take_shares(torch.from_numpy(table_of(self.space)), 0)
        reader.begin(m.Begin(**(MESSAGES["begin-full"] | {"places": 1 << 40})))
        return reader


def weights_of(specs: tuple[m.ParameterSpec, ...]) -> LiveWeights:
    flats = {}
    for number, spec in enumerate(specs):
        noise = np.random.default_rng(number).integers(0, 256, spec.numel * spec.dtype.item_size)
        if spec.dtype.name == "bool":
            noise %= 2
        line = torch.empty(len(noise), dtype=torch.uint8).copy_(torch.from_numpy(noise))
        flats[number] = Flat.of(line.view(torch_dtype(spec.dtype)))
    return LiveWeights(flats, Space(whole(specs)))


@st.composite
def sent(draw: st.DrawFn) -> tuple[Sent, list[Tile]]:
    """Right ones."""
    specs = draw(strategies.layouts())
    space = draw(strategies.spaces(specs).filter(len))
    size, tiles = draw(strategies.changes(space))
    numbers = reference.sizes(tiles, size) | {"compression": "none"}
    return Sent(space, weights_of(specs), numbers, reference.payload(tiles, size)), tiles


def check_changes(changes: Changes, space: Space) -> None:
    """The rules of section 3 in plain integers."""
    size, places = changes.sizes.item_size, changes.places.numpy().view(np.uint16).tolist()
    shares = [(share.spec.dtype.item_size, share.numel) for share in space.given]
    there, before, whole_numel = reference.tiles_of(shares), -1, 0
    for tile, count in zip(*(column.tolist() for column in changes.table()), strict=True):
        share, _, numel = there[tile]
        assert before < tile
        assert shares[share][0] == size
        some, places, before = places[:count], places[count:], tile
        assert some == sorted(set(some))
        assert len(some) == count
        assert all(place < numel for place in some)
        whole_numel += 0 if count else numel + -numel % (16 // size)
    assert not places
    assert whole_numel == len(changes.whole)


def mutated(data: st.DataObject, payload: bytes) -> bytes:
    """Other bytes in some places, or cut, or longer."""
    made = bytearray(payload)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(made) - 1))
        made[at] = data.draw(st.sampled_from([0, 1, 2, 16, 127, 128, 255]) | st.integers(0, 255))
    if data.draw(st.integers(0, 9)) == 0:
        return bytes(made[: data.draw(st.integers(0, len(made)))])
    return bytes(made) + bytes(data.draw(st.sampled_from([0, 0, 0, 0, 1, 16])))


def mutated_numbers(data: st.DataObject, numbers: dict[str, Any]) -> dict[str, Any]:
    made = dict(numbers)
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(NUMBERS))
        near = st.integers(made[name] - 9, made[name] + 9)
        made[name] = data.draw(near | st.integers(0, 1 << 41) | st.sampled_from([1, 2, 4, 8]))
    return made


def coded(data: st.DataObject, one: Sent, tiles: list[Tile]) -> bytes:
    """Streams stored or packed, some of them others."""
    old = data.draw(st.integers(0, 255))
    streams = reference.streams(
        tiles, one.numbers["item_size"], lambda *_: old, width=data.draw(st.sampled_from([1, 2]))
    )
    if data.draw(st.booleans()):
        nth = data.draw(st.integers(0, 3))
        streams[nth] = mutated(data, streams[nth] or b"0")
    return reference.coded(streams, data.draw(st.sampled_from(PACKERS)))


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@pytest.mark.parametrize("compression", ["none", "gap"])
@given(case=sent(), data=st.data())
def test_w27_w28_w29_changes_that_lie_are_refused_or_within_bounds(
    compression: str, case: tuple[Sent, list[Tile]], data: st.DataObject
) -> None:
    one, tiles = case
    numbers = mutated_numbers(data, one.numbers) | {"compression": compression}
    payload = one.payload if compression == "none" else coded(data, one, tiles)
    lying = replace(one, numbers=numbers, payload=mutated(data, payload))
    most = 40 * len(lying.payload)
    if compression == "gap":  # in the memory that the bucket declares
        most = 50 * Sizes(*(max(0, numbers[name]) for name in NUMBERS)).num_bytes
    if most < 50 << 22:
        assert peak_of(partial(lying.read, one.reader())) < most + SLACK
    try:
        received = lying.read(one.reader())
    except WireError:
        assert lying != one
        return
    check_changes(received.changes, one.space)


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@pytest.mark.parametrize("nth", range(4))
def test_w27_w28_streams_as_long_as_they_may_be_take_memory_in_proportion(nth: int) -> None:
    """Some kilobytes, packed: gaps that are too many or mostly escapes, and too many tiles."""
    numel = 1 << 18
    space = Space(whole((m.ParameterSpec(("a",), (numel,), dtypes.BY_NAME["int8"]),)))
    numbers = {"item_size": 1, "tiles": len(space), "places": numel, "whole": 0}
    room = Sizes(*numbers.values()).num_bytes
    fill = 4 * room - 9 & ~1
    escapes = b"\xff" * (fill // 2 - numel) + bytes(numel)
    streams = [
        [b"", struct.pack("<BQ", 1, 0) + bytes(fill), b"", b""],
        [b"", struct.pack("<BQ", 1, 0) + b"\xff" * (fill - numel) + bytes(numel), b"", b""],
        [b"", struct.pack("<BQ", 2, 0) + escapes * 2, b"", b""],
        [bytes(fill & ~3), b"", b"", b""],
    ]
    payload = reference.coded(streams[nth], compress)
    assert len(payload) < 4096
    bomb = Sent(space, LiveWeights({}, space), numbers | {"compression": "gap"}, payload)
    with pytest.raises(WireError):
        bomb.read(bomb.reader())
    assert peak_of(partial(bomb.read, bomb.reader())) < 20 * room


def test_w11_a_layout_of_more_tiles_than_numbers_is_refused() -> None:
    int8 = dtypes.BY_NAME["int8"]
    most = m.ParameterSpec(("a",), (1 << 44,), int8)
    assert len(Space(whole((most,)))) == 1 << 32
    for more in ((1,), (1 << 62,)):
        specs = (most, *(m.ParameterSpec((f"b{n}",), more, int8) for n in range(9)))
        with pytest.raises(LimitExceeded, match="tiles"):
            Space(whole(specs))


# Shares


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@given(st.binary(max_size=400))
def test_any_bytes_as_a_table_of_shares(raw: bytes) -> None:
    specs = (m.ParameterSpec(("a",), (1 << 62,), dtypes.BY_NAME["int8"]),)
    table = np.frombuffer(raw[: len(raw) // SHARE.itemsize * SHARE.itemsize], np.uint8)
    assert peak_of(partial(space_of, table, specs)) < SLACK
