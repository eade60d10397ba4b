"""The framing between the two processes."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from deltasync.demo.link import Array, Link, LinkClosed, LinkError, Message


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def frame(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + data


def test_round_trip(ends: tuple[socket.socket, socket.socket]) -> None:
    tokens = np.arange(12, dtype=np.int64).reshape(3, 4)
    rewards = np.array([0.5, -0.0, np.nan], dtype=np.float32)
    empty = np.empty((0, 4), dtype=np.float32)
    arrays: dict[str, Array] = {"tokens": tokens, "rewards": rewards, "empty": empty}
    Link(ends[0]).send(Message("rollouts", {"seed": None, "seconds": 0.25}, arrays))
    got = Link(ends[1]).receive()
    assert (got.kind, got.values) == ("rollouts", {"seed": None, "seconds": 0.25})
    assert list(got.arrays) == list(arrays)
    for name, array in arrays.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()


def test_larger_than_the_socket_buffer(ends: tuple[socket.socket, socket.socket]) -> None:
    big = np.arange(1 << 20, dtype=np.int64)
    thread = threading.Thread(target=Link(ends[0]).send, args=[Message("big", {}, {"big": big})])
    thread.start()
    assert np.array_equal(Link(ends[1]).receive().arrays["big"], big)
    thread.join()


def test_messages_keep_their_order(ends: tuple[socket.socket, socket.socket]) -> None:
    for kind in ("one", "two"):
        Link(ends[0]).send(Message(kind))
    link = Link(ends[1])
    assert [link.receive().kind, link.receive().kind] == ["one", "two"]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 2) + b"{[",
        struct.pack("<I", 2) + b"\xff\xfe",
        frame([]),
        frame({"kind": "x", "values": {}}),
        frame({"kind": 1, "values": {}, "arrays": {}}),
        frame({"kind": "x", "values": {}, "arrays": {"a": ["object", [1]]}}),
        frame({"kind": "x", "values": {}, "arrays": {"a": ["int64", [-1]]}}),
        frame({"kind": "x", "values": {}, "arrays": {"a": ["int64", [True]]}}),
        frame({"kind": "x", "values": {}, "arrays": {"a": ["int64", [1 << 40]]}}),
        frame({"kind": "x", "values": {}, "arrays": {"a": 3}}),
    ],
)
def test_bad_bytes_are_refused(ends: tuple[socket.socket, socket.socket], data: bytes) -> None:
    ends[0].sendall(data)
    with pytest.raises(LinkError) as caught:
        Link(ends[1]).receive()
    assert not isinstance(caught.value, LinkClosed)


@pytest.mark.parametrize("data", [b"", b"\x05\x00", frame({"kind": "x"})[:-1]])
def test_the_end_is_noticed_anywhere(
    ends: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    ends[0].sendall(data)
    ends[0].close()
    with pytest.raises(LinkClosed):
        Link(ends[1]).receive()


def test_sending_to_nobody(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(LinkClosed):
        Link(ends[0]).send(Message("hello"))
