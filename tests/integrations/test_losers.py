"""A trainer that has lost its engine, and does not know it: it is told, and harms nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from deltasync.errors import EngineFailed, EngineTaken
from deltasync.testing.processes import Child
from tests.integrations.served import Engine, served
from tests.integrations.test_two_trainers import Trainer, is_of, trainers
from tests.worlds.fleets import OneCall, Server, Split, fleet_of, model, outcome
from tests.worlds.links import bits_equal, until
from tests.worlds.toy_engines import SHAPES as SPLIT_SHAPES


def test_it_is_told_when_it_disconnects() -> None:
    with trainers(1, 2, take_over=True) as (engine, (first, second)):
        first.send()
        second.send()
        with pytest.raises(EngineTaken, match=second.sync.sender.stream_id):
            first.sync.disconnect()
        assert second.send() == "delta"  # it was not disconnected
        assert is_of(engine, second)
        engine.calls.clear()
        first.sync.disconnect()  # it knows
        assert engine.calls == []
        second.sync.close()
        first.send()
        assert is_of(engine, first)
        first.sync.disconnect()
        assert not engine.worker.is_connected


def test_who_never_had_the_engine_disconnects_nobody() -> None:
    with trainers(1, 2) as (engine, (first, second)):
        first.send()
        second.sync.disconnect()
        assert first.send() == "delta"
        assert is_of(engine, first)


def at(engine: Engine, call: str, trainer: Trainer) -> None:
    """Let another trainer take the engine when this is asked for next, before it is done."""

    def take(asked: str) -> None:
        if asked == call:
            engine.before = lambda call: None
            trainer.send()

    engine.before = take


@pytest.mark.parametrize("call", ["write", "name"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["full", "delta"])
def test_what_it_has_asked_for_is_not_done_when_the_engine_is_anothers(
    call: str, earlier: int
) -> None:
    """It does not end the other one's pause, and names nothing."""
    with trainers(1, 2, take_over=True) as (engine, (first, second)):
        for _ in range(earlier):
            first.send()
        at(engine, call, second)
        assert isinstance(outcome(first.send), Exception)
        assert is_of(engine, second)
        with pytest.raises(EngineTaken, match=second.sync.sender.stream_id):
            first.send()
        assert second.send() == "delta"
        assert is_of(engine, second)


def test_it_does_not_end_a_pause_of_the_other_one() -> None:
    """In which that one writes, maybe."""
    with trainers(1, 2, take_over=True) as (engine, (first, second)):
        first.send()

        def take(asked: str) -> None:
            if asked == "name":
                engine.before = lambda call: None
                engine.fails.add("continue_generation")
                outcome(second.send)
                engine.fails.clear()
                engine.calls.clear()

        engine.before = take
        with pytest.raises(EngineTaken):
            first.send()
        assert engine.is_paused
        assert engine.calls == []


def test_its_close_does_not_end_a_pause_of_the_other_one() -> None:
    with trainers(1, 2, take_over=True) as (engine, (first, second)):
        engine.fails.add("continue_generation")
        outcome(first.send)
        outcome(second.send)
        engine.fails.clear()
        assert engine.is_paused
        engine.calls.clear()
        first.sync.close()
        assert "continue_generation" not in engine.calls
        assert engine.is_paused
        second.send()
        assert is_of(engine, second)


@pytest.mark.parametrize("kind", [Server, Split, OneCall])
def test_a_fleet_is_told_when_it_removes_a_server(
    kind: type[Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = SPLIT_SHAPES if kind is Split else {"a": (8, 4), "b": (33,)}
    (tmp_path / "other").mkdir()
    with (
        fleet_of(tmp_path, 2, kind=kind, shapes=shapes) as here,
        fleet_of(tmp_path / "other", 1, kind=kind, shapes=shapes) as there,
    ):
        here.send()
        taken = here.servers["1"]
        there.fleet.add(taken, workers=kind.world, paused=taken.paused, name="b", take_over=True)
        there.catch_up()
        with pytest.raises(EngineTaken, match=there.fleet.sender.stream_id):
            here.fleet.remove("1").result(60)
        (said,) = [one.message for one in caplog.records if "is left" in one.message]
        assert there.fleet.sender.stream_id in said
        there.step()
        stats = there.send()
        assert (stats.kind, stats.lost, taken.holds(there.source)) == ("delta", {}, True)
        here.fleet.remove("0").result(60)
        assert here.servers["0"].calls[-1] == "disconnect"


def test_a_fleet_is_told_when_it_disconnects_and_lets_the_others_go(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with (
        fleet_of(tmp_path, 3) as here,
        fleet_of(tmp_path / "other", 1) as there,
    ):
        here.send()
        taken = here.servers["1"]
        there.fleet.add(taken, paused=taken.paused, name="b", take_over=True)
        there.catch_up()
        with pytest.raises(EngineTaken, match="^1: .*" + there.fleet.sender.stream_id):
            here.fleet.disconnect()
        for name in ("0", "2"):
            assert not here.servers[name].workers[0].is_connected
        there.step()
        assert (there.send().kind, taken.holds(there.source)) == ("delta", True)
        here.step()
        assert list(here.send().lost) == ["1"]


def test_a_server_that_was_not_connected_is_not_asked_when_it_is_removed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with fleet_of(tmp_path, 1) as here, fleet_of(tmp_path / "other", 0) as there:
        here.send()
        server = here.servers["0"]
        there.fleet.add(server, paused=server.paused, name="b")
        there.fleet.remove("b").result(60)
        here.step()
        assert here.send().kind == "delta"


def test_a_late_call_in_one_call_is_not_done(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with (
        fleet_of(tmp_path, 1, kind=OneCall) as here,
        fleet_of(tmp_path / "other", 1, kind=OneCall) as there,
    ):
        here.send()
        taken = here.servers["0"]
        there.fleet.add(taken, paused=taken.paused, name="b", take_over=True)
        ended = Event()

        def take(asked: str) -> None:
            if asked == "switch":
                taken.before = lambda call: None
                there.catch_up()
                ended.set()

        taken.before = take
        here.step()
        outcome(here.send)
        assert ended.wait(120)
        (update,) = here.fleet._engines["0"].updates
        assert isinstance(update.exception(60), EngineTaken)
        assert taken.holds(there.source)
        assert (taken.version, taken.is_paused) == (there.fleet.sender.version, False)
        there.step()
        assert (there.send().kind, taken.holds(there.source)) == ("delta", True)


def taking(url: str, seed: int, steps: int, path: Path | None, take_over: bool) -> None:
    """A trainer's process: it takes the engine, syncs, and then it is busy for long."""
    engine = Engine(model(9))
    engine.url = url
    trainer = Trainer(engine, seed, take_over=take_over, path=path)
    for _ in range(steps):
        trainer.send()
    time.sleep(600)


def kill_at(
    engine: Engine,
    call: str,
    seed: int,
    then: Callable[[], object],
    *,
    steps: int = 1,
    path: Path | None = None,
    take_over: bool = False,
) -> None:
    """Kill a trainer when it asks for this in its last step, and do something else first.

    Returns when what was asked for is done, or refused.
    """
    children, did, asked = list[Child](), list[object](), list[str]()

    def kill(now: str) -> None:
        asked.append(now)
        if asked.count(call) == steps and now == call:
            engine.before = lambda call: None
            until(lambda: bool(children), timeout_s=60.0)
            children[0].kill()
            did.append(then())

    engine.before = kill
    with Child(taking, engine.url, seed, steps, path, take_over) as child:
        children.append(child)
        until(lambda: bool(did), timeout_s=120.0)
        until(lambda: sorted(engine.ended) == sorted(engine.calls), timeout_s=60.0)


CALLS = ["connect", "pause_generation", "write", "name", "continue_generation"]


@pytest.mark.parametrize("call", CALLS)
def test_the_engine_of_a_winner_that_was_killed_comes_back_to_who_asks(call: str) -> None:
    """Its call was on the way."""
    with served(Engine(model(9))) as engine:
        first = Trainer(engine, 1)
        with first.sync:
            first.send()
            kill_at(engine, call, 2, lambda: None, take_over=True)
            with pytest.raises(EngineTaken):
                first.sync.disconnect()
            until(lambda: isinstance(outcome(first.send), str), timeout_s=60.0)
            assert is_of(engine, first)


@pytest.mark.parametrize("call", CALLS[1:])
@pytest.mark.parametrize("steps", [1, 2], ids=["full", "delta"])
def test_calls_of_a_loser_that_was_killed_change_nothing_when_they_arrive(
    call: str, steps: int
) -> None:
    """But for a pause, which says nobody's name. It ends with the next version."""
    with served(Engine(model(9))) as engine:
        second = Trainer(engine, 2, take_over=True)
        with second.sync:
            kill_at(engine, call, 1, second.send, steps=steps)
            assert bits_equal(second.source, engine.module)
            assert engine.version == "1"
            assert engine.is_paused == (call == "pause_generation")
            assert second.send() == "delta"
            assert is_of(engine, second)


def test_a_connect_of_a_trainer_that_was_killed_is_no_loss_for_good() -> None:
    with served(Engine(model(9))) as engine:
        second = Trainer(engine, 2)
        with second.sync:
            kill_at(engine, "connect", 1, second.send, take_over=True)
            until(lambda: isinstance(outcome(second.send), str), timeout_s=60.0)
            assert is_of(engine, second)


@pytest.mark.parametrize("call", ["write", "name"])
def test_late_calls_of_a_killed_trainer_are_not_taken_for_its_successors(
    call: str, tmp_path: Path
) -> None:
    """Which listens at the same address."""
    path = tmp_path / "socket"
    with served(Engine(model(9))) as engine, ExitStack() as stack:
        successors: list[Trainer] = []

        def succeed() -> None:
            trainer = Trainer(engine, 2, path=path)
            stack.enter_context(trainer.sync)
            until(lambda: isinstance(outcome(trainer.send), str), timeout_s=60.0)
            while trainer.sync.sender.version < 3:
                trainer.send()
            successors.append(trainer)

        kill_at(engine, call, 1, succeed, path=path)
        (second,) = successors
        assert bits_equal(second.source, engine.module)
        assert engine.version == "3"
        assert second.send() == "delta"
        assert is_of(engine, second)


def test_a_disconnect_that_is_late_does_not_disconnect_the_other_one() -> None:
    with trainers(1, 2, take_over=True) as (engine, (first, second)):
        first.send()
        at(engine, "disconnect", second)
        with pytest.raises(EngineTaken, match=second.sync.sender.stream_id):
            first.sync.disconnect()
        assert second.send() == "delta"
        assert is_of(engine, second)


def test_an_update_that_is_late_does_not_write_the_next_version_before_the_pause() -> None:
    with trainers(1) as (engine, (trainer,)), ThreadPoolExecutor() as calls:
        for _ in range(2):
            trainer.send()
        assert engine.worker._last is not None
        late = calls.submit(engine.client().update, 1, engine.worker._last.holder)
        until(engine._turn.locked, timeout_s=60.0)
        at_pause: list[bool] = []

        def note(call: str) -> None:
            if call == "pause_generation":
                assert isinstance(late.exception(60), EngineFailed)
                at_pause.append(bits_equal(trainer.source, engine.module))

        engine.before = note
        assert trainer.send() == "delta"
        assert at_pause == [False]
        assert is_of(engine, trainer)


def test_a_server_that_hangs_and_was_removed_and_taken_is_not_disconnected_late(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    with (
        fleet_of(tmp_path, 2, timeout_s=3.0) as here,
        fleet_of(tmp_path / "other", 1) as there,
    ):
        here.send()
        taken = here.servers["1"]
        taken.hangs = "update"
        here.step()
        here.send()
        parted = here.fleet.remove("1")
        there.fleet.add(taken, paused=taken.paused, name="b", take_over=True)
        there.catch_up()
        taken.goes_on.set()
        with pytest.raises(EngineTaken):
            parted.result(60)
        there.step()
        stats = there.send()
        assert (stats.kind, stats.lost, taken.holds(there.source)) == ("delta", {}, True)
        assert (taken.version, taken.is_paused) == (there.fleet.sender.version, False)
