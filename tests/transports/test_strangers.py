"""Connections of anybody: no call waits for them longer than it may, and little of them is kept."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from deltasync.errors import PeerLost, TransportTimeout
from deltasync.testing.links import PATIENCE_S, PROMPT_S, within
from deltasync.transports import collective, shared_memory
from deltasync.transports.control import endpoints
from deltasync.transports.control.connection import Kind, deadline_in
from tests.transports.star import GREETING, HEADER, SECRET, Star, is_closed, make_star, message

__all__ = ["make_star"]

HALF_GREETING = HEADER.pack(b"dS", Kind.GREETING, 1 << 20) + b"half"

MakeStar = Callable[..., Star]


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


# Time


def test_a_poll_returns_although_there_are_no_descriptors(make_star: MakeStar) -> None:
    star = make_star()
    for _ in range(4):
        star.raw()
    with descriptors_left(0):
        with within(PROMPT_S):
            assert star.server.poll(deadline_in(0)) == []
        cpu = time.thread_time()
        assert star.server.poll(deadline_in(0.5)) == []
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
            star.server.poll(deadline_in(0.05))
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
            star.server.poll(deadline_in(0))
    star.welcome(star.client(secret))


@pytest.mark.promise("Security", "Strangers cost bounded connections, bytes, descriptors and time.")
@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
def test_half_messages_and_trickles_cost_a_call_a_moment(
    make_star: MakeStar, secret: bytes | None
) -> None:
    star = make_star(secret, greeting_timeout_s=90.0)
    kind, length = (Kind.GREETING, 1 << 20) if secret is None else (Kind.NONCE, 32)
    star.raw(HALF_GREETING[:9])
    sock = star.raw(HEADER.pack(b"dS", kind, length))

    def trickle() -> None:
        with suppress(OSError):
            while not star.is_over.wait(0.005):
                sock.send(b"x")

    threading.Thread(target=trickle, daemon=True).start()
    star.server.poll(deadline_in(0.3))
    with within(PROMPT_S):
        for _ in range(200):
            star.server.poll(deadline_in(0))


def test_a_greeting_that_has_begun_comes_in_with_the_call(
    make_star: MakeStar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it takes as long as a large one over a slow network."""
    monkeypatch.setattr(endpoints, "_MOMENT_S", PROMPT_S)
    star = make_star()
    sock = star.raw(GREETING[:-1])
    later = threading.Timer(0.3, sock.sendall, [GREETING[-1:]])
    later.start()
    assert len(star.server.poll(deadline_in(0))) == 1
    later.join()


def test_a_large_greeting_comes_in_with_few_polls(make_star: MakeStar) -> None:
    star = make_star()
    client = star.client()
    greeting = bytes(4 << 20)
    thread = threading.Thread(target=client.connect, args=(greeting, deadline_in(100)))
    thread.start()
    num_polls = 1
    while not (came := star.server.poll(deadline_in(0))):
        num_polls += 1
        time.sleep(0.05)
    assert [data for _, data in came] == [greeting]
    assert num_polls < 40, "a poll reads what is there, not a part"
    thread.join(PATIENCE_S)


def test_a_sender_that_does_not_accept_does_not_hold_a_receiver(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(3):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(str(path))
        with (
            closing(shared_memory.Receiver(path)) as receiver,
            within(3),
            pytest.raises(TransportTimeout),
        ):
            receiver.connect(b"hello", timeout_s=0.3)


@pytest.mark.promise("Time", "A call returns after its timeout, whatever keeps sending.")
def test_a_sender_that_keeps_sending_does_not_hold_a_receiver() -> None:
    is_over = threading.Event()
    abandon = message(Kind.ABANDON, bytes(8)) * 1000

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with suppress(OSError), sock:
            sock.setblocking(False)
            while not is_over.is_set():
                with suppress(BlockingIOError):
                    sock.send(abandon)
                with suppress(BlockingIOError):
                    sock.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with closing(collective.Receiver(*listener.getsockname()[:2])) as receiver:
            receiver.connect(b"hello", timeout_s=PATIENCE_S)
            with within(3), pytest.raises((TransportTimeout, PeerLost)):
                receiver.receive(timeout_s=0.3)
        is_over.set()
        thread.join(PATIENCE_S)


# Memory


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
    monkeypatch.setattr(endpoints, "_MAX_BYTES", 1 << 20)
    star = make_star()
    strangers = [star.raw(HALF_GREETING + bytes(100_000)) for _ in range(20)]
    star.server.poll(deadline_in(1))
    num_closed = sum(is_closed(sock, timeout_s=0.01) for sock in strangers)
    assert 8 <= num_closed <= 10
    star.welcome(star.client())


def test_peers_that_nobody_listens_to_say_little(make_star: MakeStar) -> None:
    star = make_star()
    peer, sock = star.peer()
    with suppress(OSError):
        sock.sendall(message(Kind.REPLY, bytes(30_000)) * 4)
    assert star.until_lost(peer)


def test_of_the_gone_only_the_answers_that_are_waited_for_are_kept(make_star: MakeStar) -> None:
    star = make_star()
    peers = [star.peer() for _ in range(2)]
    for heard in ([peer for peer, _ in peers], [peers[1][0]]):
        star.server.hear(heard)
        for _, sock in peers:
            with suppress(OSError):
                sock.sendall(message(Kind.REPLY, b"last words"))
                sock.close()
        assert all(map(star.until_lost, heard))
    first, second = (peer for peer, _ in peers)
    found = star.server.gather([first, second], Kind.REPLY, deadline_in(1))
    assert found[second] == b"last words"
    assert isinstance(found[first], PeerLost)


# Networks


@pytest.mark.promise(
    "Security",
    "A sender without a secret on an address that is not loopback logs a warning.",
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_network_without_a_secret_is_warned_of(host: str) -> None:
    with pytest.warns(UserWarning, match="without a secret"):
        collective.Sender(host).close()
    collective.Sender(host, secret=SECRET).close()
    collective.Sender("127.0.0.1").close()
