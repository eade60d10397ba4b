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
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltasync import dtypes
from deltasync.delta.changes import Changes
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.shard import whole
from deltasync.delta.staging import LiveWeights
from deltasync.delta.tiles import Space, space_of
from deltasync.errors import LimitExceeded, MalformedMessage, WireError
from deltasync.wire import messages as m
from deltasync.wire.changes import Sizes
from deltasync.wire.compression import inflate
from deltasync.wire.frame import decode
from deltasync.wire.shares import SHARE
from tests.golden.make_golden import FOLDER, MESSAGES
from tests.wire import reference
from tests.wire.test_golden import SPACE, old_weights, opened, tensor, tiles_of

NUMBERS = ["item_size", "tiles", "places", "whole"]
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
        call = partial(inflate, frame, raw_bytes)
        with pytest.raises(error):
            call()
        assert peak_of(call) < SLACK


# Changes


def read(live: LiveWeights, members: dict[str, Any], payload: bytes) -> Changes:
    """As a receiver does it. Raises WireError."""
    header = reference.header(json.dumps(members).encode(), payload_bytes=len(payload))
    bucket, _ = decode(header, max_payload_bytes=1 << 20, arrived_bytes=len(payload))
    assert isinstance(bucket, m.Bucket)
    reader = PayloadReader(live)
    reader.begin(m.Begin(**(MESSAGES["begin-full"] | {"places": 1 << 40})))
    return reader.read(bucket, tensor(payload) if payload else None).changes


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


@pytest.mark.promise("Security", "Arbitrary bytes cause a typed error, in bounded memory.")
@given(st.sampled_from(sorted(path.stem for path in FOLDER.glob("bucket-*.bin"))), st.data())
def test_w27_w28_w29_payloads_that_lie_are_refused_or_within_bounds(
    name: str, data: st.DataObject
) -> None:
    """In the memory that comes, or that the bucket declares for what is packed."""
    live = LiveWeights(old_weights(), SPACE)
    bucket, payload = opened(name)
    honest = bucket.model_dump(), payload.numpy().tobytes()
    members, raw = mutated_numbers(data, honest[0]), mutated(data, honest[1])
    most = 40 * len(raw)
    if members["compression"] != "none":
        most = 50 * Sizes(*(max(0, members[name]) for name in NUMBERS)).num_bytes
    if most < 50 << 22:
        assert peak_of(partial(read, live, members, raw)) < most + SLACK
    try:
        changes = read(live, members, raw)
    except WireError:
        assert (members, raw) != honest
        return
    tiles = tiles_of(changes)
    assert [tile.number for tile in tiles] == sorted({tile.number for tile in tiles})
    for tile in tiles:
        assert SPACE.item_size[SPACE.share[tile.number]] == changes.sizes.item_size
        places = list(tile.places or [])
        assert places == sorted(set(places))
        assert all(place < SPACE.numel[tile.number] for place in places)


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
