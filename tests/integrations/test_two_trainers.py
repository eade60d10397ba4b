"""Two trainers that want one engine: the second is told who has it, and may take it on purpose.

A trainer that has lost its engine, and does not know it, is told, and harms nobody.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltasync.errors import ConfigError, EngineFailed, EngineTaken, SyncAborted
from deltasync.testing.processes import Child
from deltasync.transports import shared_memory
from tests.worlds.fleets import (
    SHAPES,
    Here,
    OneCall,
    Server,
    Split,
    at,
    engine_of,
    fleet_of,
    hung,
    model,
    outcome,
)
from tests.worlds.links import bits_equal, until
from tests.worlds.served import Served, served
from tests.worlds.toy_engines import SHAPES as SPLIT_SHAPES

IN_PLACE = {"max_staged_bytes": 1, "timeout_s": 4.0}


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


def comes_back(here: Here) -> None:
    until(lambda: not isinstance(outcome(here.train), Exception))
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


def test_who_took_over_does_not_do_so_again_because_a_later_call_failed(tmp_path: Path) -> None:
    class Reached(OneCall):
        def reach(self, paused: Callable[[], object], /) -> int:
            self.at("reach")
            return super().reach(paused)

    engine = Reached(model(9))
    with (
        engine_of(tmp_path / "first", server=engine) as first,
        engine_of(tmp_path / "second", server=engine, take_over=True) as second,
        engine_of(tmp_path / "third", server=engine, take_over=True) as third,
    ):
        first.train()
        engine.fails = "reach"
        with pytest.raises(EngineFailed, match="planted"):
            second.train()
        third.train()
        with pytest.raises(EngineTaken, match=stream_of(third)):
            second.train()
        has_it(third)


@pytest.mark.parametrize("how", ["disconnect", "close", "restart"])
def test_an_engine_that_its_trainer_has_left_or_that_was_restarted_is_free(
    how: str, tmp_path: Path
) -> None:
    with trainers(tmp_path, 2, take_over=False) as (engine, (first, second)):
        first.train()
        if how == "restart":
            engine.die()
            engine.start()
        else:
            getattr(first.sync, how)()
        second.train()
        second.check()
        if how != "close":
            with pytest.raises(EngineTaken):
                first.train()
        has_it(second)


@pytest.mark.parametrize("call", ["update", "name", "disconnect"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["full", "delta"])
def test_what_a_loser_has_asked_for_is_not_done_when_the_engine_is_anothers(
    call: str, earlier: int, tmp_path: Path
) -> None:
    """It does not end the other one's pause, and names nothing."""
    with trainers(tmp_path, 2) as (engine, (first, second)):
        for _ in range(earlier):
            first.train()
        if call == "disconnect":
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


@pytest.mark.parametrize("end", ["call", "close"])
def test_a_loser_does_not_end_a_pause_of_the_other_one(end: str, tmp_path: Path) -> None:
    """In which that one writes, maybe."""
    with trainers(tmp_path, 2) as (engine, (first, second)):

        def takes() -> None:
            engine.never.add("resume")
            outcome(second.train)
            engine.never.clear()
            engine.calls.clear()

        if end == "call":
            first.train()
            engine.before = at(1, "name", takes)
            with pytest.raises(EngineTaken):
                first.train()
        else:
            engine.never.add("resume")
            outcome(first.train)
            takes()
            first.sync.close()
        assert "resume" not in engine.calls
        assert engine.is_paused
        second.train()
        second.check()


def test_a_version_that_waits_to_be_written_is_no_reason_to_give_the_engine_away(
    tmp_path: Path,
) -> None:
    with trainers(tmp_path, 2, take_over=False) as (engine, (first, second)):
        first.train()

        def intrude() -> None:
            until(lambda: state_of(engine) == "COMMITTING")
            with pytest.raises(EngineTaken):
                second.sync.connect()

        engine.before = at(1, "pause", intrude)
        has_it(first)


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


def train(url: str, folder: Path, seed: int, steps: int, options: dict[str, Any]) -> None:
    """A trainer's process: it syncs, and then it is busy for long."""
    engine = Served(model(9))
    engine.url = url
    with trainer(engine, folder, seed, **options) as here:
        for _ in range(steps):
            here.train()
        time.sleep(600)


Trained = tuple[Path, int, int, dict[str, Any]]
"""What `train` takes after the URL."""


def at_last(
    engine: Served, call: str, which: Trained, do: Callable[[Child], object], why: str = ""
) -> None:
    """Do something to a trainer's process when it asks for this in its last step, before it is
    done, or fails for a reason.

    Returns when what was asked for is done, or refused.
    """
    children, did = list[Child](), list[object]()

    def strike() -> None:
        until(lambda: bool(children))
        did.append(do(children[0]))
        if why:
            raise RuntimeError(why)

    engine.before = at(which[2], call, strike)
    with Child(train, engine.url, *which) as process:
        children.append(process)
        until(lambda: bool(did), timeout_s=120.0)
        until(lambda: sorted(engine.ended) == sorted(engine.calls))
    engine.before = lambda call: None


@pytest.mark.parametrize("call", ["connect", "pause", "update", "name", "resume"])
def test_the_engine_of_a_winner_that_was_killed_comes_back_to_who_asks(
    call: str, tmp_path: Path
) -> None:
    """Its call was on the way."""
    with trainers(tmp_path, 1) as (engine, (first,)):
        first.train()
        at_last(engine, call, (tmp_path / "winner", 2, 1, {"take_over": True}), Child.kill)
        with pytest.raises(EngineTaken):
            first.sync.disconnect()
        comes_back(first)


@pytest.mark.parametrize("call", ["update", "name"])
def test_late_calls_of_a_killed_trainer_are_not_taken_for_its_successors(
    call: str, tmp_path: Path
) -> None:
    """Which listens at the same address."""
    with served(Served(model(9))) as engine, ExitStack() as stack:
        successors: list[Here] = []

        def succeed(child: Child) -> None:
            child.kill()
            here = stack.enter_context(trainer(engine, tmp_path, 2))
            until(lambda: not isinstance(outcome(here.train), Exception))
            while here.sync.sender.version < 3:
                here.train()
            successors.append(here)

        at_last(engine, call, (tmp_path, 1, 1, {}), succeed)
        successors[0].check()
        has_it(successors[0])


def test_the_successor_of_a_trainer_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Also at its address, where the worker greets it before it is asked to connect."""
    with served(Served(model(9))) as engine, ExitStack() as stack:
        with Child(train, engine.url, tmp_path / "first", 1, 2, {}) as first:
            until(lambda: engine.version == 2 and not engine.is_paused)
            second = stack.enter_context(trainer(engine, tmp_path / "second", 2))
            first.pause()  # it may go on
            with pytest.raises(EngineTaken):
                second.train()
            first.kill()
            second.train()
            second.check()
        second.sync.close()
        with Child(train, engine.url, tmp_path / "third", 1, 2, {}) as third:
            until(lambda: engine.version == 2 and not engine.is_paused)
            third.kill()
        fourth = stack.enter_context(trainer(engine, tmp_path / "third", 2))
        until(lambda: state_of(engine) == "JOINING")
        fourth.train()
        fourth.check()


@pytest.mark.parametrize(
    ("options", "state"), [({}, "COMMITTING"), (IN_PLACE, "STAGING")], ids=["staged", "in place"]
)
def test_the_successor_of_a_trainer_that_was_killed_as_it_had_decided_goes_on(
    options: dict[str, Any], state: str, tmp_path: Path
) -> None:
    """The worker has staged a version, or is about to receive it, and waits to be asked to write
    it.
    """
    with served(Served(model(9))) as engine:

        def kill(child: Child) -> None:
            until(lambda: state_of(engine) == state)
            child.kill()

        at_last(engine, "update", (tmp_path / "first", 1, 2, options), kill, "planted")
        assert state_of(engine) == state
        with trainer(engine, tmp_path / "second", 2, **options) as second:
            if state == "STAGING":  # nothing tells that the first one has ended, but its silence
                until(lambda: not isinstance(outcome(second.train), EngineTaken))
            second.train()
            second.check()


@pytest.mark.parametrize(("call", "version"), [("update", 1), ("resume", 2)])
def test_a_pause_in_which_a_trainer_was_killed_ends_with_the_first_version_of_its_successor(
    call: str, version: int, tmp_path: Path
) -> None:
    """Also if the engine holds that already, so that nothing has to be written."""
    with served(Served(model(9))) as engine:
        at_last(engine, call, (tmp_path / "first", 1, 2, {}), Child.kill, "planted")
        assert engine.is_paused
        with trainer(engine, tmp_path / "second", 1) as second:
            for _ in range(version):
                second.step()
            assert engine.holds(second.source)
            engine.calls.clear()
            second.send()
            assert "update" not in engine.calls
            second.check()


# Fleets


@contextmanager
def fleets(
    folder: Path, count: int, kind: type[Server] = Server, **options: Any
) -> Iterator[tuple[Here, Here]]:
    """One of so many servers, and one of one."""
    shapes = SPLIT_SHAPES if kind is Split else SHAPES
    with (
        fleet_of(folder / "here", count, kind=kind, shapes=shapes, **options) as here,
        fleet_of(folder / "there", 1, kind=kind, shapes=shapes, **options) as there,
    ):
        here.send()
        yield here, there


def take(here: Here, there: Here, name: str) -> Server:
    """A server of one fleet for the other."""
    taken = there.add(here.servers[name], f"taken {name}", take_over=True)
    there.catch_up()
    return taken


@pytest.mark.parametrize("kind", [Server, Split, OneCall])
def test_a_fleet_is_told_which_servers_another_trainer_has(
    kind: type[Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
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
        taken = take(here, there, "1")
        for _ in range(2):
            assert stream_of(there) in here.train().lost["1"]
            has_it(there)
            here.follow("0")
        take(here, there, "2")
        caplog.clear()
        here.fleet.remove("1").result(60)  # it knows that one
        with pytest.raises(EngineTaken, match="^2: .*" + stream_of(there)):
            here.fleet.disconnect()
        assert not here.servers["0"].workers[0].is_connected
        assert set(here.train().lost) == {"2"}
        take(here, there, "0")
        caplog.clear()
        with pytest.raises(EngineTaken, match=stream_of(there)):
            here.fleet.remove("0").result(60)
        (said,) = [one.message for one in caplog.records if "is left" in one.message]
        assert stream_of(there) in said
        here.fleet.remove("2").result(60)
        here.add(taken, "again")
        with pytest.raises(SyncAborted, match="0 of at least 1 servers") as caught:
            here.send()
        assert isinstance(caught.value.__cause__, EngineTaken)
        has_it(there)


def test_nobody_else_can_listen_where_a_trainer_does(tmp_path: Path) -> None:
    with fleets(tmp_path, 1), pytest.raises(ConfigError, match="another sender listens"):
        shared_memory.Sender(tmp_path / "here" / "socket")


def test_a_late_call_in_one_call_is_not_done(tmp_path: Path) -> None:
    with fleets(tmp_path, 1, OneCall) as (here, there):
        here.servers["0"].before = at(1, "switch", lambda: take(here, there, "0"))
        outcome(here.train)
        (update,) = here.fleet._engines["0"].updates
        assert isinstance(update.exception(120), EngineTaken)
        there.check()
        has_it(there)


def test_a_server_that_hangs_and_was_removed_and_taken_is_not_disconnected_late(
    tmp_path: Path,
) -> None:
    with fleets(tmp_path, 2, timeout_s=3.0) as (here, there):
        here.servers["1"].hangs = "update"
        here.train()
        hung(here.servers["1"])
        parted = here.fleet.remove("1")
        take(here, there, "1").goes_on.set()
        with pytest.raises(EngineTaken):
            parted.result(60)
        has_it(there)
