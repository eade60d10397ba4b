"""Receivers that wait for the rest of their engine: bounded in number, bytes and time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.sync.protocol import lobby as lobby_module
from deltasync.sync.protocol.links import SenderLink
from deltasync.sync.protocol.lobby import Lobby
from deltasync.testing.links import background
from deltasync.transports import inprocess
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import Failed, Hello, Refused
from tests.worlds.links import until


class Waiting:
    """A lobby, and receivers that greet it by hand."""

    def __init__(self) -> None:
        self.transport = inprocess.Sender()
        self.lobby = Lobby(SenderLink(self.transport), lambda engine: True)

    def greet(self, engine: str, rank: int, world: int, *, names: int = 0) -> inprocess.Receiver:
        parameters = tuple(((f"p{n}",), (), 1) for n in range(names))
        hello = Hello(
            engine=engine,
            rank=rank,
            world=world,
            format_versions=(1,),
            stream_id=None,
            version=None,
            parameters=parameters,
            connection=None,
            lanes=0,
        )
        receiver = self.transport.receiver()
        receiver.connect(encode(hello, payload_bytes=0), timeout_s=1)
        return receiver

    def listen(self) -> None:
        """Until all greetings are read, however slow this machine is."""
        for _ in range(20):
            self.lobby.listen(timeout_s=0)

    def refusal(self, receiver: inprocess.Receiver) -> str:
        answer, _ = decode(receiver.receive(timeout_s=1).header)
        assert isinstance(answer, Refused)
        return answer.reason


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    waiting = Waiting()
    with closing(waiting.transport):
        yield waiting


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
def test_engines_that_never_become_whole_are_bounded_in_number(waiting: Waiting) -> None:
    whole = [waiting.greet("whole", rank, 2) for rank in range(2)]
    first = waiting.greet("first", 0, 2)
    for number in range(1500):
        waiting.greet(f"e{number}", 0, 2)
    waiting.listen()
    assert len(waiting.lobby) <= 1024 + len(whole)
    assert [len(engine) for engine in waiting.lobby.engines()] == [2]
    assert "1 of 2 ranks of engine 'first'" in waiting.refusal(first)


def test_ranks_that_connect_again_and_again_do_not_pile_up(waiting: Waiting) -> None:
    for _ in range(1500):
        waiting.greet("engine", 0, 2)
    waiting.listen()
    waiting.greet("engine", 1, 2)
    waiting.greet("engine", 0, 2)
    waiting.listen()
    assert len(waiting.lobby) <= 1026
    assert [len(engine) for engine in waiting.lobby.engines()] == [2]


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
def test_engines_that_never_become_whole_are_bounded_in_bytes(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby_module, "_MAX_INCOMPLETE_BYTES", 3 << 20)
    for number in range(6):
        waiting.greet(f"e{number}", 0, 2, names=4000)  # some 1.2 MiB each
        waiting.listen()
    assert len(waiting.lobby) == 2


@pytest.mark.promise(
    "Security",
    "Engines whose ranks never all connect cost bounded receivers, bytes and time.",
)
def test_engines_that_never_become_whole_are_bounded_in_time(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby_module, "_PATIENCE_S", 0.2)
    late = waiting.greet("late", 0, 2)
    waiting.greet("whole", 0, 1)
    waiting.listen()
    assert len(waiting.lobby) == 2
    time.sleep(0.3)
    early = waiting.greet("early", 0, 2)
    waiting.listen()
    assert len(waiting.lobby) == 2
    assert "start the others" in waiting.refusal(late)
    assert waiting.transport.is_connected(2)
    early.close()


def test_reasons_of_strangers_do_not_pile_up(waiting: Waiting) -> None:
    for _ in range(1000):
        receiver = waiting.transport.receiver()
        failed = Failed(version=None, error="E", reason="x" * 4096)
        receiver.connect(encode(failed, payload_bytes=0), timeout_s=1)
    waiting.listen()
    assert len(waiting.lobby.declined()) <= 64


def test_an_engine_comes_in_beside_halves_of_others() -> None:
    model, copy = nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()
    link = inprocess.Sender()
    with closing(WeightSender(ModuleSource(model), link)) as sender:
        halves = Waiting()
        halves.transport = link
        for number in range(1200):
            halves.greet(f"e{number}", 0, 2)
        receiver = WeightReceiver(ModuleTarget(copy), link.receiver())
        served = background(lambda: receiver.receive_weights(timeout_s=10))
        until(lambda: link.is_connected(1200))
        sender.send_weights(timeout_s=5)
        served.result(10)
    assert torch.equal(model.weight.bfloat16(), copy.weight)
