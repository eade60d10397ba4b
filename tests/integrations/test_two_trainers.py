"""Two trainers that want one engine: the second is told who has it, and may take it on purpose.

A trainer that has lost its engine, and does not know it, is told, and harms nobody.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltasync.errors import EngineFailed, EngineTaken
from deltasync.testing.processes import Child
from tests.worlds.fleets import (
    Here,
    OneCall,
    Server,
    at,
    engine_of,
    fleet_of,
    model,
    outcome,
)
from tests.worlds.links import bits_equal, until
from tests.worlds.served import Served, served


def trainer(
    engine: Served, folder: Path, seed: int, **options: Any
) -> AbstractContextManager[Here]:
    """A trainer of its own source, with one engine."""
    return engine_of(
        folder,
        server=engine,
        through=Served.client,
        source=model(seed),
        **{"timeout_s": 20.0, **options},
    )


@contextmanager
def trainers(
    folder: Path, count: int, *, take_over: bool = True, timeout_s: float = 20.0
) -> Iterator[tuple[Served, list[Here]]]:
    """An engine and its would-be trainers; `take_over` is that of all but the first."""
    with served(Served(model(9))) as engine, ExitStack() as stack:
        each = [
            trainer(
                engine, folder / str(n), n + 1, take_over=take_over and n > 0, timeout_s=timeout_s
            )
            for n in range(count)
        ]
        yield engine, [stack.enter_context(one) for one in each]


def stream_of(here: Here) -> str:
    return here.sync.sender.stream_id


def has_it(here: Here) -> None:
    """It was not disconnected, and the engine follows."""
    assert here.train().kind == "delta"
    here.check()


def test_a_second_trainer_is_told_who_has_the_engine_and_harms_nobody(tmp_path: Path) -> None:
    with trainers(tmp_path, 2, take_over=False) as (_, (first, second)):
        first.train()
        for call in (second.sync.connect, second.train, second.train):
            with pytest.raises(EngineTaken) as caught:
                call()
            for known in (os.getpid(), socket.gethostname(), stream_of(first), " since 20"):
                assert str(known) in str(caught.value)
            has_it(first)
        second.sync.disconnect()
        has_it(first)


def test_who_takes_over_has_it_and_the_others_are_told_and_do_not_take_it_back(
    tmp_path: Path,
) -> None:
    with trainers(tmp_path, 3) as (engine, (first, second, third)):
        for one in (first, second, third):
            one.train()
            one.check()
        with pytest.raises(EngineTaken, match=stream_of(third)):
            first.sync.disconnect()
        for _ in range(2):  # `second` took it over once
            with pytest.raises(EngineTaken, match=stream_of(third)):
                second.train()
            has_it(third)
        engine.calls.clear()
        for loser in (first, second):  # they know
            loser.sync.disconnect()
            loser.sync.close()
        assert engine.calls == []
        has_it(third)
        third.sync.disconnect()
        assert not engine.workers[0].is_connected


@pytest.mark.parametrize("call", ["update", "name", "disconnect"])
def test_what_a_loser_has_asked_for_is_not_done_when_the_engine_is_anothers(
    call: str, tmp_path: Path
) -> None:
    """It does not end the other one's pause, and names nothing."""
    with trainers(tmp_path, 2) as (engine, (first, second)):
        first.train()
        engine.before = at(1, call, second.train)
        if call == "disconnect":
            with pytest.raises(EngineTaken, match=stream_of(second)):
                first.sync.disconnect()
        else:
            assert isinstance(outcome(first.train), Exception)
        second.check()
        if call != "disconnect":
            with pytest.raises(EngineTaken, match=stream_of(second)):
                first.train()
        has_it(second)


@pytest.mark.parametrize("call", ["update", "resume"])
def test_a_pause_of_who_has_lost_the_engine_is_the_new_trainers_affair(
    call: str, tmp_path: Path
) -> None:
    with trainers(tmp_path, 2, timeout_s=4.0) as (engine, (first, second)):
        first.train()
        engine.never.add(call)
        assert isinstance(outcome(first.train), Exception)
        engine.never.clear()
        assert engine.is_paused
        second.train()
        second.check()
        with pytest.raises(EngineTaken):
            first.train()
        engine.calls.clear()
        first.sync.close()
        assert engine.calls == []


def test_who_has_lost_the_engine_and_closes_does_not_end_the_pause_of_the_other(
    tmp_path: Path,
) -> None:
    """It has paused the engine too, and does not know that it is another's."""
    with trainers(tmp_path, 2, timeout_s=4.0) as (engine, (first, second)):
        engine.never.add("resume")
        assert isinstance(outcome(first.train), Exception)
        engine.never.clear()
        at_close: list[bool] = []

        def close() -> None:
            first.sync.close()
            at_close.append(engine.is_paused)

        engine.before = at(1, "update", close)
        second.train()
        assert at_close == [True]
        second.check()


def state_of(engine: Served) -> str:
    receiver = engine.workers[0]._receiver
    return "" if receiver is None else receiver.state.name


def test_an_update_that_is_late_does_not_write_the_next_version_before_the_pause(
    tmp_path: Path,
) -> None:
    with trainers(tmp_path, 1) as (engine, (here,)), ThreadPoolExecutor() as calls:
        for _ in range(2):
            here.train()
        late = calls.submit(engine.client().update, 1, here.holder)
        until(engine.turn.locked)
        at_pause: list[bool] = []

        def note() -> None:
            assert isinstance(late.exception(60), EngineFailed)
            at_pause.append(bits_equal(here.source, engine.module))

        engine.before = at(1, "pause", note)
        has_it(here)
        assert at_pause == [False]


# Trainers that are killed


def train(url: str, folder: Path) -> None:
    """A trainer's process: it syncs twice, and then it is busy for long."""
    engine = Served(model(9))
    engine.url = url
    with trainer(engine, folder, 1) as here:
        for _ in range(2):
            here.train()
        time.sleep(600)


def test_the_successor_of_a_trainer_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Also at its address, where the worker greets it before it is asked to connect."""
    with served(Served(model(9))) as engine, ExitStack() as stack:
        with Child(train, engine.url, tmp_path / "first") as first:
            until(lambda: engine.version == 2 and not engine.is_paused)
            second = stack.enter_context(trainer(engine, tmp_path / "second", 2))
            first.pause()  # it may go on
            with pytest.raises(EngineTaken):
                second.train()
            first.kill()
            second.train()
            second.check()
        second.sync.close()
        with Child(train, engine.url, tmp_path / "third") as third:
            until(lambda: engine.version == 2 and not engine.is_paused)
            third.kill()
        fourth = stack.enter_context(trainer(engine, tmp_path / "third", 2))
        until(lambda: state_of(engine) == "JOINING")
        fourth.train()
        fourth.check()


# Fleets


@contextmanager
def fleets(folder: Path, count: int, kind: type[Server]) -> Iterator[tuple[Here, Here]]:
    """One of so many servers, and one of one."""
    with (
        fleet_of(folder / "here", count, kind=kind) as here,
        fleet_of(folder / "there", 1, kind=kind) as there,
    ):
        here.send()
        yield here, there


def take(here: Here, there: Here, name: str) -> None:
    """A server of one fleet for the other."""
    there.add(here.servers[name], f"taken {name}", take_over=True)
    there.catch_up()


def answered(here: Here, name: str) -> str:
    """Sync, until a server that is behind has said why: no call waits long for it alone."""
    while (why := here.train().lost[name]) == "TransportTimeout: it has not connected yet":
        time.sleep(0.05)
    return why


@pytest.mark.parametrize("kind", [Server, OneCall])
def test_a_fleet_is_told_which_servers_another_trainer_has(
    kind: type[Server], tmp_path: Path
) -> None:
    with fleets(tmp_path, 3, kind) as (here, there):
        there.add(here.servers["1"], "b")
        lost = there.train().lost["b"]
        assert lost.startswith("EngineTaken: the engine follows another trainer")
        assert stream_of(here) in lost
        assert here.train().lost == {}
        here.check()
        there.fleet.remove("b").result(60)  # which does not disconnect it
        del there.servers["b"]
        assert here.train().kind == "delta"
        here.check()
        take(here, there, "1")
        for _ in range(2):
            assert stream_of(there) in answered(here, "1")
            has_it(there)
            here.follow("0")
        take(here, there, "2")
        here.fleet.remove("1").result(60)  # it knows that one
        with pytest.raises(EngineTaken, match="^2: .*" + stream_of(there)):
            here.fleet.disconnect()
        assert not here.servers["0"].workers[0].is_connected
        assert set(here.train().lost) == {"2"}
        take(here, there, "0")
        with pytest.raises(EngineTaken, match=stream_of(there)):
            here.fleet.remove("0").result(60)
        has_it(there)


def test_a_late_call_in_one_call_is_not_done(tmp_path: Path) -> None:
    with fleets(tmp_path, 1, OneCall) as (here, there):
        here.servers["0"].before = at(1, "switch", lambda: take(here, there, "0"))
        outcome(here.train)
        (update,) = here.fleet._engines["0"].updates
        assert isinstance(update.exception(120), EngineTaken)
        there.check()
        has_it(there)
