"""`reset` ends every connection of a sender's end, and peers connect again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltasync.errors import PeerLost
from deltasync.transports import collective, inprocess, shared_memory
from deltasync.transports.base import ReceiveTransport, SendTransport

Ends = tuple[SendTransport, Callable[[], ReceiveTransport]]


def of_threads(path: Path) -> Ends:
    sender = inprocess.Sender()
    return sender, sender.receiver


def of_processes(path: Path) -> Ends:
    return shared_memory.Sender(path), lambda: shared_memory.Receiver(path)


def of_hosts(path: Path) -> Ends:
    sender = collective.Sender(secret=b"secret")
    return sender, lambda: collective.Receiver(*sender.address, secret=b"secret")


@pytest.mark.parametrize("ends", [of_threads, of_processes, of_hosts])
def test_all_are_lost_and_come_back(ends: Callable[[Path], Ends], tmp_path: Path) -> None:
    sender, made = ends(tmp_path / "socket")
    known, unheard = made(), made()
    with sender, known, unheard, ThreadPoolExecutor(2) as threads:

        def greet(one: ReceiveTransport) -> int:
            connecting = threads.submit(one.connect, b"hello", timeout_s=30)
            here: list[int] = []
            while not here:
                greeted = [peer for peer, _ in sender.poll(timeout_s=1)]
                here = [peer for peer in greeted if sender.is_connected(peer)]
            connecting.result(30)
            return here[0]

        first = greet(known)
        assert not sender.open_epoch([first], timeout_s=10)
        later = threads.submit(unheard.connect, b"hello", timeout_s=0.5)
        later.exception(30)
        for _ in range(2):  # also of none
            sender.reset()
        assert not sender.is_connected(first)
        with pytest.raises(PeerLost):
            known.receive(timeout_s=30)
        again = greet(known)
        assert again > first
        assert not sender.open_epoch([again], timeout_s=10)
        assert greet(unheard) > again
        sender.close()
        sender.reset()


@pytest.mark.parametrize("ends", [of_processes, of_hosts])
def test_dropping_peers_while_the_end_is_closed_raises_nothing(
    ends: Callable[[Path], Ends], tmp_path: Path
) -> None:
    """`close` ends what `drop` would: neither may take from under the other."""
    for number in range(20):
        sender, made = ends(tmp_path / f"{number}")
        with sender, made() as receiver, ThreadPoolExecutor(2) as threads:
            greeted = threads.submit(receiver.connect, b"hello", timeout_s=30)
            [(peer, _)] = sender.poll(timeout_s=30)
            greeted.result(30)
            closed = threads.submit(sender.close)
            dropped = [threads.submit(sender.drop, peer) for _ in range(3)]
            for call in (closed, *dropped):
                call.result(30)
