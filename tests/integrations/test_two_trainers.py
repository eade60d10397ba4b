"""Two trainers that want one engine: the second is told who has it, and may take it on purpose."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from deltasync import ModuleSource, ModuleTarget, StagingThread, WeightReceiver, WeightSender
from deltasync.errors import ConfigError, EngineTaken, SyncAborted
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.worker import Worker
from deltasync.testing.processes import Child
from deltasync.transports import shared_memory
from tests.integrations.served import Engine, served
from tests.worlds.fleets import Server, Split, fleet_of, model, outcome
from tests.worlds.links import Model, bits_equal, until
from tests.worlds.toy_engines import SHAPES as SPLIT_SHAPES

NONE: dict[str, Any] = {}


class Trainer:
    """A trainer of its own source, with one engine."""

    def __init__(
        self, engine: Engine, seed: int, *, path: Path | None = None, **options: Any
    ) -> None:
        self.source, server = model(seed), engine.client()
        self.sync = EngineSync(
            ModuleSource(self.source),
            server,
            shared_memory.Sender(path),
            paused=server.paused,
            **{"timeout_s": 20.0, **options},
        )

    def send(self) -> str:
        """Train a step and send it. Returns the kind of the sync."""
        for weights in self.source.parameters():
            weights.data[0] *= -2
        return self.sync.send_weights().kind


@contextmanager
def trainers(*seeds: int, take_over: bool = False) -> Iterator[tuple[Engine, list[Trainer]]]:
    """An engine and its would-be trainers; `take_over` is that of all but the first."""
    with served(Engine(model(9))) as engine:
        each = [
            Trainer(engine, seed, take_over=take_over and n > 0) for n, seed in enumerate(seeds)
        ]
        try:
            yield engine, each
        finally:
            for one in each:
                one.sync.close()


def is_of(engine: Engine, trainer: Trainer) -> bool:
    """Whether the engine has the trainer's weights, by its name, and generates."""
    is_named = engine.version == str(trainer.sync.sender.version)
    return bits_equal(trainer.source, engine.module) and is_named and not engine.is_paused


def test_a_second_trainer_is_told_who_has_the_engine_and_harms_nobody() -> None:
    with trainers(1, 2) as (engine, (first, second)):
        first.send()
        for call in (second.sync.connect, second.send, second.send):
            with pytest.raises(EngineTaken) as caught:
                call()
            for known in (os.getpid(), socket.gethostname(), first.sync.sender.stream_id):
                assert str(known) in str(caught.value)
            assert " since 20" in str(caught.value)
            assert is_of(engine, first)
            assert first.send() == "delta"  # it was not disconnected
        assert is_of(engine, first)


def test_who_takes_over_has_it_and_the_other_one_is_told_and_does_not_take_it_back() -> None:
    with trainers(1, 2, take_over=True) as (engine, (first, second)):
        first.send()
        second.send()
        assert is_of(engine, second)
        for _ in range(2):
            with pytest.raises(EngineTaken, match=second.sync.sender.stream_id):
                first.send()
            assert second.send() == "delta"
            assert is_of(engine, second)
        engine.calls.clear()
        first.sync.disconnect()
        first.sync.close()
        assert engine.calls == []  # it is another one's
        assert second.send() == "delta"


def test_who_took_over_once_does_not_take_it_back_when_it_has_lost_it() -> None:
    with trainers(1, 2, 3, take_over=True) as (engine, (first, second, third)):
        for one in (first, second, third):
            one.send()
        for _ in range(2):
            with pytest.raises(EngineTaken, match=third.sync.sender.stream_id):
                second.send()
        assert third.send() == "delta"
        assert is_of(engine, third)


def test_an_engine_that_its_trainer_has_left_is_free() -> None:
    with trainers(1, 2, 3) as (engine, (first, second, third)):
        first.send()
        first.sync.disconnect()
        second.send()
        with pytest.raises(EngineTaken):
            first.send()
        second.sync.close()
        third.send()
        assert is_of(engine, third)


def test_an_engine_that_was_restarted_is_free() -> None:
    with trainers(1, 2) as (engine, (first, second)):
        first.send()
        engine.worker.disconnect()
        engine.worker = Worker()
        second.send()
        with pytest.raises(EngineTaken):
            first.send()
        assert is_of(engine, second)


@pytest.mark.parametrize("call", ["write", "continue_generation"])
def test_a_pause_of_who_has_lost_the_engine_is_the_new_trainers_affair(call: str) -> None:
    with trainers(1, 2, take_over=True) as (engine, (first, second)):
        first.send()
        engine.fails.add(call)
        assert isinstance(outcome(first.send), Exception)
        engine.fails.clear()
        assert engine.is_paused
        second.send()
        assert is_of(engine, second)
        with pytest.raises(EngineTaken):
            first.send()
        engine.calls.clear()
        first.sync.close()
        assert engine.calls == []


def train(
    url: str, seed: int, steps: int, path: Path | None = None, options: dict[str, Any] = NONE
) -> None:
    """A trainer's process: it syncs, and then it is busy for long."""
    engine = Engine(model(9))
    engine.url = url
    trainer = Trainer(engine, seed, path=path, **options)
    for _ in range(steps):
        trainer.send()
    time.sleep(600)


def test_the_successor_of_a_trainer_that_was_killed_goes_on() -> None:
    with served(Engine(model(9))) as engine, Child(train, engine.url, 1, 2) as first:
        until(lambda: engine.version == "2" and not engine.is_paused, timeout_s=60.0)
        second = Trainer(engine, 2)
        with second.sync:
            first.pause()  # it may go on
            with pytest.raises(EngineTaken):
                second.send()
            first.kill()
            second.send()
            assert is_of(engine, second)


@pytest.mark.parametrize(
    ("options", "state"),
    [(NONE, "COMMITTING"), ({"max_staged_bytes": 1, "timeout_s": 4.0}, "STAGING")],
)
def test_the_successor_of_a_trainer_that_was_killed_as_it_had_decided_goes_on(
    options: dict[str, Any], state: str
) -> None:
    """The worker has staged a version, or is about to receive it, and waits to be asked to write
    it.
    """
    with served(Engine(model(9))) as engine:
        with Child(train, engine.url, 1, 9, None, options) as first:

            def kill(call: str) -> None:
                if call == "write" and engine.version == "1":
                    until(lambda: state_of(engine) == state, timeout_s=60.0)
                    engine.before = lambda call: None
                    first.kill()
                    raise RuntimeError("planted")

            engine.before = kill
            until(lambda: not first.is_alive, timeout_s=60.0)
        assert state_of(engine) == state
        second = Trainer(engine, 2, **options)
        with second.sync:
            if state == "STAGING":  # nothing tells that the first one has ended, but its silence
                until(lambda: not isinstance(outcome(second.send), EngineTaken), timeout_s=60.0)
            second.send()
            assert is_of(engine, second)


def test_a_trainer_that_was_killed_and_listens_again_at_its_address_goes_on(
    tmp_path: Path,
) -> None:
    """The worker greets it before it is asked to connect, as it did the one that was killed."""
    path = tmp_path / "socket"
    with served(Engine(model(9))) as engine:
        with Child(train, engine.url, 1, 2, path) as first:
            until(lambda: engine.version == "2" and not engine.is_paused, timeout_s=60.0)
            first.kill()
        second = Trainer(engine, 2, path=path)
        with second.sync:
            until(lambda: state_of(engine) == "JOINING", timeout_s=60.0)
            second.send()
            assert is_of(engine, second)


@pytest.mark.parametrize(("call", "version"), [("write", 1), ("continue_generation", 2)])
def test_a_pause_in_which_a_trainer_was_killed_ends_with_the_first_version_of_its_successor(
    call: str, version: int
) -> None:
    """Also if the engine holds that already, so that nothing has to be written."""
    with served(Engine(model(9))) as engine:
        with Child(train, engine.url, 1, 9) as first:

            def kill(asked: str) -> None:
                if (asked, engine.version) == (call, str(version)):
                    engine.before = lambda call: None
                    first.kill()
                    raise RuntimeError("planted")

            engine.before = kill
            until(lambda: not first.is_alive, timeout_s=60.0)
        assert engine.is_paused
        second = Trainer(engine, 1)
        for _ in range(version):
            for weights in second.source.parameters():
                weights.data[0] *= -2
        assert bits_equal(second.source, engine.module)
        engine.calls.clear()
        with second.sync:
            second.sync.send_weights()
            assert "write" not in engine.calls
            assert is_of(engine, second)


def state_of(engine: Engine) -> str:
    receiver = engine.worker._receiver
    return "" if receiver is None else receiver.state.name


def test_a_version_that_waits_to_be_written_is_no_reason_to_give_the_engine_away() -> None:
    with trainers(1, 2) as (engine, (first, second)):
        first.send()

        def intrude(call: str) -> None:
            if call == "pause_generation":
                engine.before = lambda call: None
                until(lambda: state_of(engine) == "COMMITTING", timeout_s=60.0)
                with pytest.raises(EngineTaken):
                    second.sync.connect()

        engine.before = intrude
        assert first.send() == "delta"
        assert is_of(engine, first)


@pytest.mark.parametrize("kind", [Server, Split])
def test_a_fleet_is_told_which_servers_another_trainer_has(
    kind: type[Server], tmp_path: Path
) -> None:
    shapes = SPLIT_SHAPES if kind is Split else {"a": (8, 4), "b": (33,)}
    (tmp_path / "other").mkdir()
    with (
        fleet_of(tmp_path, 2, kind=kind, shapes=shapes, timeout_s=10.0) as here,
        fleet_of(tmp_path / "other", 1, kind=kind, shapes=shapes, timeout_s=10.0) as there,
    ):
        here.send()
        there.add(here.servers["1"], "theirs")
        there.step()
        stats = there.send()
        assert stats.lost["theirs"].startswith("EngineTaken: the engine follows another trainer")
        assert here.fleet.sender.stream_id in stats.lost["theirs"]
        here.step()
        assert (here.send().lost, here.servers["1"].is_paused) == ({}, False)
        there.fleet.remove("theirs")  # which does not disconnect it
        here.step()
        assert (here.send().kind, here.servers["1"].holds(here.source)) == ("delta", True)

        taken = here.servers["1"]
        there.fleet.add(taken, workers=kind.world, paused=taken.paused, name="b", take_over=True)
        there.catch_up()
        for _ in range(2):
            here.step()
            lost = here.send().lost
            assert there.fleet.sender.stream_id in lost["1"], lost
            there.step()
            assert there.send().kind == "delta"
            assert taken.holds(there.source)
        assert here.servers["0"].holds(here.source)
        here.fleet.remove("0")
        with pytest.raises(SyncAborted, match="0 of at least 1 servers") as caught:
            here.send()
        assert isinstance(caught.value.__cause__, EngineTaken)


def test_one_server_under_two_urls_follows_the_first_and_the_other_one_is_lost(
    tmp_path: Path,
) -> None:
    with served(Engine(model(9))) as engine:
        source = model(1)
        link = shared_memory.Sender(tmp_path / "socket")
        with EngineFleet(ModuleSource(source), link, timeout_s=10.0) as fleet:
            for name in ("one", "two"):
                client = engine.client()
                fleet.add(client, workers=1, paused=client.paused, name=name)
            stats = fleet.send_weights()
            (lost,) = stats.lost
            for _ in range(3):
                source.get_parameter("a").data[0] *= -2
                stats = fleet.send_weights()
                assert (stats.kind, list(stats.lost)) == ("delta", [lost])
                assert bits_equal(source, engine.module)
                assert not engine.is_paused


def test_a_receiver_stays_with_its_sender_and_nobody_else_can_listen_there(tmp_path: Path) -> None:
    """It goes to another training run at the same address only when its own has ended."""

    def sender(source: Model) -> WeightSender:
        return WeightSender(ModuleSource(source), shared_memory.Sender(tmp_path / "socket"))

    sources, target = [model(1), model(2)], model(9)
    receiver = WeightReceiver(ModuleTarget(target), shared_memory.Receiver(tmp_path / "socket"))
    with receiver, StagingThread(receiver, pause=nullcontext):
        with sender(sources[0]) as first:
            first.wait_for_receivers(1)
            first.send_weights()
            with pytest.raises(ConfigError, match="another sender listens"):
                sender(sources[1])
            assert first.send_weights().receivers == 1
            assert bits_equal(sources[0], target)
        with sender(sources[1]) as second:
            second.wait_for_receivers(1)
            assert second.send_weights().receivers == 1
            assert bits_equal(sources[1], target)
        receiver.close()
