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
from tests.worlds.links import Fleet, fleet, until
from tests.worlds.peers import hello, model


class Lobby:
    """A trainer, and receivers that greet it by hand."""

    def __init__(self, here: Fleet) -> None:
        self.here = here

    def greet(self, engine: str, world: int, *, names: int = 1) -> ReceiveTransport:
        receiver = self.here.transport.receiver()
        parameters = tuple(((f"p{n}",), (), 1) for n in range(names))
        receiver.connect(encode(hello(engine, 0, world, parameters=parameters)), timeout_s=60)
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


@pytest.fixture
def waiting() -> Iterator[Lobby]:
    with fleet(model()) as here:
        yield Lobby(here)


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
@pytest.mark.parametrize(
    ("come", "names", "max_bytes", "stay"),
    [(1500, 1, 1 << 30, 1024), (6, 4000, 3 << 20, 2)],  # 4000 names take some 1.2 MiB
    ids=["number", "bytes"],
)
def test_engines_that_never_become_whole_are_bounded_in_number_and_bytes(
    waiting: Lobby,
    come: int,
    names: int,
    max_bytes: int,
    stay: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that have waited longest go; whole ones come in beside all others."""
    monkeypatch.setattr(lobby, "_MAX_INCOMPLETE_BYTES", max_bytes)
    first, *_ = [waiting.greet(f"e{number}", 2, names=names) for number in range(come)]
    assert waiting.count() == stay
    assert "1 of 2 ranks of engine 'e0'" in waiting.refusal(first)
    waiting.here.add(model(1))
    until(lambda: waiting.here.transport.is_connected(come))
    assert waiting.here.sender.send_weights(timeout_s=60).receivers == 1


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
def test_engines_that_never_become_whole_are_bounded_in_time(
    waiting: Lobby, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = waiting.greet("late", 2)
    waiting.greet("whole", 1)
    assert waiting.count() == 2
    time.sleep(0.3)
    monkeypatch.setattr(lobby, "_PATIENCE_S", 0.2)
    waiting.count()
    assert "start the others" in waiting.refusal(late)
    monkeypatch.undo()
    waiting.greet("early", 2)
    assert waiting.count() == 2


def test_reasons_of_strangers_do_not_pile_up(waiting: Lobby) -> None:
    for number in range(1000):
        failed = Failed(version=None, error="E", reason=f"{number}: " + "x" * 4000)
        waiting.here.transport.receiver().connect(encode(failed), timeout_s=60)
    with pytest.raises(EngineFailed) as told:
        waiting.count()
    assert len(str(told.value)) < 65 * 4096
