"""The messages between the two processes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from deltasync.demo import link as demo_link
from deltasync.demo.link import Link, LinkClosed, LinkError, Message


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def links(ends: tuple[socket.socket, socket.socket]) -> Iterator[list[Link]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Link(end))) for end in ends]


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def test_round_trip(links: list[Link]) -> None:
    arrays = {
        "tokens": torch.arange(12).view(3, 4),
        "rewards": torch.tensor([0.5, -0.0, float("nan"), 1e-45, 0.1, float("-inf")]),
        "empty": torch.empty(0),
    }
    values = {"seed": None, "seconds": 0.25} | {n: array.tolist() for n, array in arrays.items()}
    links[0].send(Message("rollouts", values))
    got = links[1].receive()
    assert (got.kind, got.values["seed"], got.values["seconds"]) == ("rollouts", None, 0.25)
    assert list(got.values) == list(values)
    for name, array in arrays.items():
        found = torch.tensor(got.values[name])
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.numpy().tobytes() == array.numpy().tobytes()


def test_larger_than_the_socket_buffer(links: list[Link]) -> None:
    big = list(range(1 << 20))
    thread = threading.Thread(target=links[0].send, args=[Message("big", {"big": big})])
    thread.start()
    assert links[1].receive().values["big"] == big
    thread.join()


def test_messages_keep_their_order(links: list[Link]) -> None:
    for kind in ("one", "two"):
        links[0].send(Message(kind))
    assert [links[1].receive().kind, links[1].receive().kind] == ["one", "two"]


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 64,
        b"{[\n",
        b"\xff\xfe\n",
        b"\n",
        line([]),
        line({"kind": "x"}),
        line({"kind": 1, "values": {}}),
        line({"kind": "x", "values": []}),
    ],
)
def test_bad_bytes_are_refused(
    ends: tuple[socket.socket, socket.socket],
    links: list[Link],
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo_link, "MAX_MESSAGE_BYTES", 64)
    ends[0].sendall(data)
    with pytest.raises(LinkError) as caught:
        links[1].receive()
    assert not isinstance(caught.value, LinkClosed)


@pytest.mark.parametrize("data", [b"", b"{", line({"kind": "x", "values": {}})[:-1]])
def test_the_end_is_noticed_anywhere(
    ends: tuple[socket.socket, socket.socket], links: list[Link], data: bytes
) -> None:
    ends[0].sendall(data)
    links[0].close()
    with pytest.raises(LinkClosed):
        links[1].receive()


def test_sending_to_nobody(links: list[Link]) -> None:
    links[1].close()
    with pytest.raises(LinkClosed):
        links[0].send(Message("hello"))
