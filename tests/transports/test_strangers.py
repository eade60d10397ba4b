"""Connections of anybody: no call waits for them longer than it may, and little of them is kept."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from deltasync.testing.links import PROMPT_S, within
from deltasync.transports import collective
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
