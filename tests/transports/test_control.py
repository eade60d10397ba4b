"""The control plane: bounded, typed, signed; bad bytes end one connection and nothing else.

No call waits for anybody longer than it may, and little of strangers is kept.
"""

import gc
import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

import pytest

from deltasync.errors import PeerLost, TransportTimeout
from deltasync.testing.links import PATIENCE_S, PROMPT_S, background, within
from deltasync.transports import collective
from deltasync.transports.control import newcomers
from deltasync.transports.control.connection import BrokenProtocol, Connection, Kind, deadline_in
from tests.sync.interrupts import Strike, Struck, Tracer
from tests.transports.star import GREETING, HEADER, SECRET, Star, is_closed, make_star, message

__all__ = ["make_star"]
LIMIT = 64 << 20
KINDS = {Kind.FRAME, Kind.REPLY, Kind.SEGMENT}
BAD_BYTES = {
    "http": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "random": random.Random(0).randbytes(5000),
    "magic": message(Kind.GREETING, b"hi", magic=b"Ds"),
    "unknown kind": message(200, b"hi"),
    "wrong kind": message(Kind.ABANDON, b"hi"),
    "too long": message(Kind.GREETING, b"", length=0xFFFFFFFF),
    "over the limit": message(Kind.GREETING, b"", length=LIMIT + 1),
}
MakeStar = Callable[..., Star]
HALF_GREETING = HEADER.pack(b"dS", Kind.GREETING, 1 << 20) + b"half"


@pytest.mark.parametrize("data", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bad_bytes_of_strangers_and_peers_end_their_connection_only(
    make_star: MakeStar, data: bytes
) -> None:
    star = make_star()
    client = star.client()
    peer = star.welcome(client)
    stranger = star.raw(data)
    assert star.turns_away(stranger)
    bad_peer, bad = star.peer()
    bad.sendall(data)
    (error,) = star.server.some_replies([bad_peer], timeout_s=PATIENCE_S).values()
    assert isinstance(error, PeerLost)
    assert not star.server.is_connected(bad_peer)
    star.assert_serves(client, peer)


@pytest.mark.promise("Security", "Strangers cost bounded connections, bytes, descriptors and time.")
def test_who_does_not_greet_is_dropped(make_star: MakeStar) -> None:
    star = make_star(greeting_timeout_s=0.2)
    silent, slow = star.raw(), star.raw(message(Kind.GREETING, b"hello")[:9])
    assert star.turns_away(silent)
    assert star.turns_away(slow)


@pytest.mark.promise("Security", "Strangers cost bounded connections, bytes, descriptors and time.")
def test_strangers_are_bounded_in_number(make_star: MakeStar) -> None:
    star = make_star()
    strangers = [star.raw() for _ in range(100)]
    star.server.poll(timeout_s=0.1)
    strangers += [star.raw() for _ in range(60)]
    give_up = deadline_in(PROMPT_S)  # those that do not greet are dropped, but later
    while not is_closed(strangers[0], timeout_s=0.01):
        assert time.monotonic() < give_up
        star.server.poll(timeout_s=0.1)
    star.assert_serves(client := star.client(), star.welcome(client))


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many more descriptors, or none."""
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd")))
    holes: list[int] = []
    while not holes or holes[-1] < most:
        holes.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (holes[-1] + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            os.close(hole)


def test_a_poll_returns_although_there_are_no_descriptors(make_star: MakeStar) -> None:
    star = make_star()
    for _ in range(4):
        star.raw()
    with descriptors_left(0):
        with within(PROMPT_S):
            assert star.server.poll(timeout_s=0) == []
        cpu = time.thread_time()
        assert star.server.poll(timeout_s=0.5) == []
        assert time.thread_time() - cpu < 0.25, "it waits instead of looking all the time"
    star.welcome(star.client())


@pytest.mark.promise("Security", "Strangers cost bounded connections, bytes, descriptors and time.")
def test_strangers_leave_descriptors_to_the_process(make_star: MakeStar) -> None:
    star = make_star()
    for _ in range(200):
        star.raw(GREETING)
    with descriptors_left(100):
        give_up = deadline_in(0.5)
        while time.monotonic() < give_up:
            star.server.poll(timeout_s=0.05)
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        for file in files:
            os.close(file)


@pytest.mark.promise("Time", "A call returns after its timeout, whatever keeps sending.")
@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
def test_who_keeps_sending_holds_up_neither_a_poll_nor_the_honest(
    make_star: MakeStar, secret: bytes | None
) -> None:
    star = make_star(secret)
    for _ in range(2):
        star.attack(lambda sock: sock.sendall(HEADER.pack(b"dS", Kind.GREETING, 8 << 20)))
        star.attack(lambda sock: sock.sendall(GREETING))
    star.attack(lambda sock: sock.close())
    time.sleep(0.1)
    with within(PROMPT_S):
        for _ in range(20):
            star.server.poll(timeout_s=0)
    star.welcome(star.client(secret))


@pytest.mark.promise(
    "Security",
    "Without the secret nobody becomes a peer, and nothing that they send is kept.",
)
@pytest.mark.parametrize(
    "said",
    [message(Kind.NONCE, bytes(32)) + bytes(32), message(Kind.NONCE, bytes(33))[:-33]],
    ids=["not signed", "more than a nonce"],
)
def test_who_does_not_know_the_secret_is_not_heard(make_star: MakeStar, said: bytes) -> None:
    """And turned away at once, without waiting for the rest."""
    star = make_star(SECRET)
    sock = star.raw(said)
    assert star.turns_away(sock)


@pytest.mark.promise("Security", "Strangers cost bounded connections, bytes, descriptors and time.")
def test_half_greetings_are_bounded_together(
    make_star: MakeStar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomers, "_MAX_BYTES", 1 << 20)
    star = make_star()
    strangers = [star.raw(HALF_GREETING + bytes(100_000)) for _ in range(20)]
    star.server.poll(timeout_s=1)
    num_closed = sum(is_closed(sock, timeout_s=0.01) for sock in strangers)
    assert 8 <= num_closed <= 10
    star.welcome(star.client())


def test_peers_that_nobody_listens_to_say_little(make_star: MakeStar) -> None:
    star = make_star()
    peer, sock = star.peer()
    with suppress(OSError):
        sock.sendall(message(Kind.REPLY, bytes(30_000)) * 4)
    assert star.until_lost(peer)


@pytest.mark.promise(
    "Security",
    "A sender without a secret on an address that is not loopback issues a warning.",
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_network_without_a_secret_is_warned_of(host: str) -> None:
    with pytest.warns(UserWarning, match="without a secret"):
        collective.Sender(host).close()
    collective.Sender(host, secret=SECRET).close()
    collective.Sender("127.0.0.1").close()


# Signed connections


@pytest.mark.promise(
    "Security",
    "Without the secret nobody becomes a peer, and nothing that they send is kept.",
)
@pytest.mark.parametrize(
    ("server", "client"),
    [(b"one", b"another"), (b"one", None), (None, b"another")],
    ids=["different", "client has none", "server has none"],
)
def test_without_the_same_secret_nobody_becomes_a_peer(
    make_star: MakeStar, server: bytes | None, client: bytes | None
) -> None:
    star = make_star(secret=server)
    stranger = star.client(secret=client)

    def connect() -> None:
        stranger.connect(b"hello", timeout_s=0.5)
        stranger.receive(timeout_s=0.5)

    connected = background(connect)
    assert star.server.poll(timeout_s=0.3) == []
    assert isinstance(connected.exception(PATIENCE_S), (PeerLost, TransportTimeout))


class Wire:
    """Two signed connections, and between them somebody who holds the cable."""

    def __init__(self, secret: bytes) -> None:
        near, self._from_client = socket.socketpair()
        far, self._from_server = socket.socketpair()
        self.client = self._end(near, secret, is_server=False)
        self.server = self._end(far, secret, is_server=True)
        self.to_client(self.sent_by_server())
        self.to_server(self.sent_by_client())

    def _end(self, sock: socket.socket, secret: bytes, *, is_server: bool) -> Connection:
        return Connection(
            sock, is_server=is_server, kinds=KINDS, max_message_bytes=LIMIT, secret=secret
        )

    def sent_by_client(self) -> bytes:
        return self._from_client.recv(1 << 20)

    def sent_by_server(self) -> bytes:
        return self._from_server.recv(1 << 20)

    def to_server(self, data: bytes) -> None:
        self._from_server.sendall(data)
        self.server.read()

    def to_client(self, data: bytes) -> None:
        self._from_client.sendall(data)
        self.client.read()

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self._from_client.close()
        self._from_server.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire(b"secret")
    yield wire
    wire.close()


def changed(position: int) -> Callable[[Wire], bytes]:
    def act(wire: Wire) -> bytes:
        data = bytearray(said(wire, b"hello"))
        data[position] ^= 1
        return bytes(data) + bytes(1 << 16)  # so that a longer length is not just waited for

    return act


def said(wire: Wire, data: bytes) -> bytes:
    wire.client.write(Kind.REPLY, data)
    return wire.sent_by_client()


def of_another_kind(wire: Wire) -> bytes:
    data = bytearray(said(wire, b"hello"))
    data[2] = Kind.FRAME
    return bytes(data)


def replayed(wire: Wire) -> bytes:
    data = said(wire, b"once")
    wire.to_server(data)
    assert wire.server.take() is not None
    return data


def reordered(wire: Wire) -> bytes:
    first = said(wire, b"first")
    return said(wire, b"second") + first


def of_another_connection(wire: Wire) -> bytes:
    other = Wire(b"secret")
    data = said(other, b"yesterday")
    other.close()
    return data


def reflected(wire: Wire) -> bytes:
    """The second of the server, which has the number that the client's next one would have."""
    wire.server.write(Kind.REPLY, b"echo")
    return wire.sent_by_server()


TAMPERED: dict[str, Callable[[Wire], bytes]] = {
    **{f"byte {position} changed": changed(position) for position in (2, 4, 8, -1)},
    "another kind": of_another_kind,
    "replayed": replayed,
    "reordered": reordered,
    "reflected": reflected,
    "of another connection": of_another_connection,
}


@pytest.mark.promise(
    "Security",
    "Signed messages cannot be changed, repeated, reordered, reflected or taken from another "
    "connection.",
)
@pytest.mark.parametrize("tampered", TAMPERED.values(), ids=TAMPERED)
def test_what_somebody_does_on_the_cable_is_noticed(
    wire: Wire, tampered: Callable[[Wire], bytes]
) -> None:
    wire.server.write(Kind.FRAME, b"down")
    wire.to_client(wire.sent_by_server())
    assert wire.client.take() is not None
    wire.to_server(tampered(wire))
    assert wire.server.lost is not None
    assert wire.server.take() is None


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_reset_ends_newcomers_whose_arrival_was_interrupted(make_star: MakeStar) -> None:
    """Or they come in later. Also while a traceback lives, whose frames hold what was accepted."""
    star, tracer = make_star(), Tracer(opcodes=True)
    star.raw(GREETING)
    tracer.places(lambda: star.server.poll(timeout_s=PATIENCE_S))
    places = [place for place in tracer.hits if place[0].co_qualname.startswith("Newcomers.")]
    for place in places:
        newcomer = star.raw(GREETING)
        with pytest.raises(Struck) as held:
            tracer.strike(lambda: star.server.poll(timeout_s=PATIENCE_S), Strike(place))
        star.server.reset()
        give_up = deadline_in(PATIENCE_S)
        while not star.server.poll(timeout_s=0.01) and not is_closed(newcomer, timeout_s=0.01):
            assert time.monotonic() < give_up, place
        assert held.traceback
    assert len(places) > 100


@pytest.mark.parametrize("secret", [None, b"secret"], ids=["plain", "signed"])
def test_an_interrupt_at_any_line_repeats_and_loses_no_message(secret: bytes | None) -> None:
    """What arrives is whole, in order and there once. What is missing is a message whose `write`
    raised before anything of it was kept, or else the connection is lost.
    """
    tracer = Tracer()
    with Talk(secret) as talk:
        tracer.places(talk.all)
    for place, visits in list(tracer.hits.items()):
        for hit in range(1, visits + 1):
            with Talk(secret) as talk, suppress(Struck):
                tracer.strike(talk.all, Strike(place, hit))
            assert talk.arrived == [number for number in range(3) if number in talk.arrived]
            missed = set(range(talk.written)).difference(talk.arrived)
            assert not missed or talk.is_lost, (place, hit)
            assert not isinstance(talk.reader.lost, BrokenProtocol), (place, hit)
    assert len(tracer.hits) > 40


class Talk:
    """Messages of one end to the other; what is left of them is read at the end.

    Attributes:
        written: How many `write` has returned for.
        arrived: Their numbers.
        is_lost: Whether an end knows that the connection has ended.
    """

    def __init__(self, secret: bytes | None) -> None:
        self.writer, self.reader = (
            Connection(sock, is_server=server, kinds=KINDS, max_message_bytes=LIMIT, secret=secret)
            for sock, server in zip(socket.socketpair(), (True, False), strict=True)
        )
        for end in (self.reader, self.writer):
            end.read()
        self.written, self.arrived, self.is_lost = 0, list[int](), False

    def all(self) -> None:
        for number in range(3):
            self.writer.write(Kind.FRAME, bytes([number]))
            self.written = number + 1
            self.reader.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_lost = bool(self.writer.lost or self.reader.lost)
        if self.writer.lost:
            self.writer.close()
        self.writer.flush()
        self.reader.read()
        while found := self.reader.take():
            self.arrived += found.data
        self.writer.close()
        self.reader.close()
