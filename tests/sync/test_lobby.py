"""Receivers that wait for the rest of their engine: bounded in number, bytes and time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from deltasync.errors import EngineFailed, TransportTimeout
from deltasync.sync.protocol import lobby
from deltasync.transports.base import ReceiveTransport
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import Failed, Refused
from tests.worlds.links import Fleet, bits_equal, fleet, until
from tests.worlds.peers import hello, model


class Lobby:
    """A trainer, and receivers that greet it by hand."""

    def __init__(self, here: Fleet) -> None:
        self.here = here

    def greet(self, engine: str, rank: int, world: int, *, names: int = 1) -> ReceiveTransport:
        receiver = self.here.transport.receiver()
        parameters = tuple(((f"p{n}",), (), 1) for n in range(names))
        greeting = hello(engine, rank, world, parameters=parameters)
        receiver.connect(encode(greeting), timeout_s=60)
        return receiver

    def count(self) -> int:
        """How many wait. All greetings are read, however slow this machine is."""
        for _ in range(20):
            with pytest.raises(TransportTimeout) as told:
                self.here.sender.wait_for_receivers(1 << 20, timeout_s=0)
        return int(str(told.value).split()[0])

    def refusal(self, receiver: ReceiveTransport) -> str:
        answer, _ = decode(receiver.receive(timeout_s=60).header)
        assert isinstance(answer, Refused)
        return answer.reason

    def let_in(self, world: int) -> None:
        """An engine of so many ranks comes in beside all others."""
        ranks = [model(1) for _ in range(world)]
        for rank, replica in enumerate(ranks):
            self.here.add(replica, rank=rank, world=world)
            peer = 1500 + rank
            until(lambda peer=peer: self.here.transport.is_connected(peer))  # type: ignore[misc]
        assert self.here.sender.send_weights(timeout_s=60).receivers == world
        assert all(bits_equal(self.here.source, replica) for replica in ranks)


@pytest.fixture
def waiting() -> Iterator[Lobby]:
    with fleet(model()) as here:
        yield Lobby(here)


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
def test_engines_that_never_become_whole_are_bounded_in_number(waiting: Lobby) -> None:
    first = waiting.greet("first", 0, 2)
    for number in range(1499):
        waiting.greet(f"e{number}", 0, 2)
    assert waiting.count() <= 1024
    assert "1 of 2 ranks of engine 'first'" in waiting.refusal(first)
    waiting.let_in(1)


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
def test_engines_that_never_become_whole_are_bounded_in_bytes(
    waiting: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby, "_MAX_INCOMPLETE_BYTES", 3 << 20)
    for number in range(6):
        waiting.greet(f"e{number}", 0, 2, names=4000)  # some 1.2 MiB each
        assert waiting.count() <= 2
    assert waiting.count() == 2


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
def test_engines_that_never_become_whole_are_bounded_in_time(
    waiting: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = waiting.greet("late", 0, 2)
    waiting.greet("whole", 0, 1)
    assert waiting.count() == 2
    time.sleep(0.3)
    monkeypatch.setattr(lobby, "_PATIENCE_S", 0.2)
    waiting.count()
    assert "start the others" in waiting.refusal(late)
    monkeypatch.undo()
    waiting.greet("early", 0, 2)
    assert waiting.count() == 2


def test_reasons_of_strangers_do_not_pile_up(waiting: Lobby) -> None:
    for number in range(1000):
        failed = Failed(version=None, error="E", reason=f"{number}: " + "x" * 4000)
        waiting.here.transport.receiver().connect(encode(failed), timeout_s=60)
    with pytest.raises(EngineFailed) as told:
        waiting.count()
    assert len(str(told.value)) < 65 * 4096


def test_ranks_that_connect_again_and_again_do_not_pile_up(waiting: Lobby) -> None:
    for _ in range(1500):
        waiting.greet("engine", 0, 2)
    assert waiting.count() <= 1024
    waiting.let_in(2)
