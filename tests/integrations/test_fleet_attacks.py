"""Attacks on fleets: whatever befalls one server or the trainer, a bystander does not notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Event, Thread

import pytest
from torch import Tensor

from deltasync import SenderOptions
from deltasync.delta.bucket import MIN_BUCKET_BYTES
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    DirtyReceiver,
    PeerLost,
    SyncAborted,
    TransportClosed,
    TransportError,
)
from deltasync.integrations.fleet_engine import FleetEngine
from deltasync.transports import collective, shared_memory
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode
from tests.worlds.fleets import OneCall, Server, Split, fleet_of, model, outcome
from tests.worlds.links import until
from tests.worlds.programs import run
from tests.worlds.toy_engines import SHAPES as SPLIT_SHAPES

LARGE = {"a": (64, 1024), "b": (33,)}
IN_PLACE = {
    "shapes": LARGE,
    "max_staged_bytes": 1,
    "options": SenderOptions(bucket_bytes=MIN_BUCKET_BYTES),
}


class Watched(shared_memory.Sender):
    """A link that does something before each message, and before each wait for answers."""

    before: Callable[[str], object] = staticmethod(lambda kind: None)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        self.before(decode(frame.header)[0].kind)
        super().send(frame, timeout_s=timeout_s)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        self.before(decode(header)[0].kind)
        super().tell(peers, header, timeout_s=timeout_s)

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        self.before("buffer")
        return super().buffer(num_bytes, timeout_s=timeout_s)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        self.before("replies")
        return super().collect_replies(timeout_s=timeout_s)

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        self.before("some replies")
        return super().some_replies(peers, timeout_s=timeout_s)


def at(number: int, kind: str, call: Callable[[], object]) -> Callable[[str], object]:
    """Do something once, at the n-th message of a kind."""
    seen = [0]

    def before(now: str) -> None:
        seen[0] += now == kind
        if now == kind and seen[0] == number:
            call()

    return before


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.promise(
    "All or nothing",
    "A server lost while others write what arrives leaves none of them dirty, where the "
    "transport outlives losses.",
)
@pytest.mark.parametrize("number", [1, 3])
def test_a_server_lost_while_all_write_what_arrives_leaves_nobody_dirty(
    number: int, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, link=Watched, **IN_PLACE) as here:  # type: ignore[arg-type]
        here.send()
        for server in here.servers.values():
            server.calls.clear()
        here.source.get_parameter("a").data.mul_(-2)  # several buckets, written as they come
        here.link.before = at(number, "bucket", here.servers["1"].die)
        stats = here.send()
        assert (stats.receivers, list(stats.lost)) == (2, ["1"])
        assert stats.num_buckets > 3
        assert here.dirty() == []
        for name in ("0", "2"):
            calls = ["pause", "update", "updated", "name", "resume"]
            assert here.servers[name].calls == calls
            assert here.servers[name].holds(here.source)
        here.link.before = lambda kind: None
        here.catch_up()
        here.check("0", "1", "2")


def test_a_server_lost_in_the_full_sync_of_many_leaves_nobody_dirty(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, link=Watched, **IN_PLACE) as here:  # type: ignore[arg-type]
        here.link.before = at(3, "bucket", here.servers["1"].die)
        stats = here.send()
        assert (stats.kind, stats.receivers, list(stats.lost)) == ("full", 2, ["1"])
        assert here.dirty() == []
        here.catch_up()
        here.check("0", "1", "2")


def test_what_is_written_as_it_arrives_and_too_few_take_is_repaired_in_the_pause(
    tmp_path: Path,
) -> None:
    """It cannot be taken back: they do not generate until the next version."""
    with fleet_of(tmp_path, 3, link=Watched, min_engines=3, **IN_PLACE) as here:  # type: ignore[arg-type]
        here.send()
        here.source.get_parameter("a").data.mul_(-2)
        here.link.before = at(3, "bucket", here.servers["1"].die)
        with pytest.raises(SyncAborted, match="2 of at least 3 servers"):
            here.send()
        assert here.fleet.sender.version == 1
        until(lambda: here.servers["0"].is_paused and here.servers["2"].is_paused)
        here.link.before = lambda kind: None
        here.catch_up()
        here.check("0", "1", "2")


@pytest.mark.promise(
    "All or nothing",
    "In a fleet, a server that fails or hangs in any call is dropped from a version and "
    "caught up; the others take it.",
)
@pytest.mark.parametrize("kind", [Server, OneCall, Split])
def test_a_server_that_dies_between_the_decision_and_its_reply_is_alone_in_that(
    kind: type[Server], tmp_path: Path
) -> None:
    shapes = {"shapes": SPLIT_SHAPES} if kind is Split else {}
    with fleet_of(tmp_path, 3, kind=kind, **shapes) as here:  # type: ignore[arg-type]
        here.send()
        here.step()
        dies = here.servers["1"]
        dies.before = lambda call: dies.die() if call in ("update", "switch") else None
        stats = here.send()
        assert list(stats.lost) == ["1"]
        assert here.dirty() == []
        assert here.servers["0"].holds(here.source)
        assert here.servers["2"].holds(here.source)
        dies.before = lambda call: None
        dies.start()
        here.catch_up()
        here.check("0", "1", "2")


@pytest.mark.promise(
    "All or nothing",
    "An engine that was restarted in its pause is paused again before it is written.",
)
def test_a_server_that_was_restarted_in_its_pause_is_paused_before_it_is_written(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.step()
        bad = here.servers["1"]
        bad.fails = "update"
        here.send()
        assert here.fleet.servers()["1"].is_paused
        bad.die()
        bad.start()  # and it generates; `update` asserts that it is paused
        bad.module.get_parameter("a").data.zero_()
        here.catch_up()
        here.check("0", "1")
        assert not here.fleet.servers()["1"].is_paused


def test_an_engine_that_a_proof_has_spoiled_is_paused_until_it_is_restarted(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, 2) as here:
        bad = here.servers["1"]
        bad.declines = DirtyReceiver("could not be put back")
        stats = here.send()
        assert stats.lost == {"1": "DirtyReceiver: could not be put back"}
        until(lambda: bad.is_paused)
        here.step()
        here.send()
        assert bad.is_paused
        bad.declines = None
        here.catch_up()
        here.check("0", "1")


@pytest.mark.timeout(300)  # gloo forms groups anew
@pytest.mark.parametrize("moment", ["prepare", "commit"])
def test_over_a_link_that_does_not_outlive_losses_the_others_have_the_version(
    moment: str, tmp_path: Path
) -> None:
    class Gloo(collective.Sender):
        before: Callable[[str], object] = staticmethod(lambda kind: None)

        def send(self, frame: Frame, *, timeout_s: float) -> None:
            self.before(decode(frame.header)[0].kind)
            super().send(frame, timeout_s=timeout_s)

    with fleet_of(tmp_path, 3, link=lambda path: Gloo(), timeout_s=25) as here:
        here.send()
        here.step()
        here.link.before = at(1, moment, here.servers["1"].die)
        stats = here.send()
        assert (stats.receivers, list(stats.lost)) == (2, ["1"])
        assert here.dirty() == []
        for name in ("0", "2"):
            assert here.servers[name].holds(here.source)
            assert not here.servers[name].is_paused
        here.catch_up()
        here.check("0", "1", "2")


@pytest.mark.promise(
    "All or nothing",
    "Where a payload travels by way of other receivers and is lost with one of them, those "
    "that miss it stay members, and have the version when the call returns.",
)
@pytest.mark.timeout(300)  # gloo forms groups anew
@pytest.mark.parametrize("dies", ["0", "1", "2"])
def test_who_is_sent_to_by_way_of_one_that_dies_has_the_version(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready for the last payload, and passes it on to nobody."""
    receive, doomed, is_armed = collective.Receiver._on_start, list[object](), Event()

    def start(receiver: collective.Receiver, data: bytes) -> None:
        if receiver in doomed and is_armed.is_set() and receiver._announced is not None:
            is_armed.clear()
            receiver._dispose()
            raise PeerLost("planted")
        receive(receiver, data)

    monkeypatch.setattr(collective.Receiver, "_on_start", start)
    with fleet_of(tmp_path, 3, link=lambda path: collective.Sender(), timeout_s=25) as here:
        here.send()
        here.step()
        (worker,) = here.servers[dies].workers
        assert worker._receiver is not None
        doomed += worker._receiver._links._links
        is_armed.set()
        stats = here.send()
        assert not is_armed.is_set()
        assert (stats.receivers, list(stats.lost)) == (2, [dies])
        assert here.dirty() == []
        for name in {"0", "1", "2"} - {dies}:
            assert here.servers[name].holds(here.source)
        here.catch_up()
        here.check("0", "1", "2")


MOMENTS = ["layout", "welcome", "begin", "bucket", "buffer", "prepare", "replies", "commit"]


@pytest.mark.promise(
    "All or nothing",
    "An interrupted trainer leaves no server of a fleet paused for good.",
)
@pytest.mark.parametrize("moment", [*MOMENTS, "some replies", "finish"])
@pytest.mark.parametrize("kind", [Server, OneCall])
def test_an_interrupted_trainer_goes_on_and_no_server_is_left_paused(
    kind: type[Server], moment: str, tmp_path: Path
) -> None:
    with fleet_of(tmp_path, 3, kind=kind, link=Watched) as here:
        if moment not in ("layout", "welcome"):
            here.send()
        here.step()
        here.link.before = at(1, moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            here.send()
        here.link.before = lambda kind: None
        here.catch_up()
        here.check("0", "1", "2")
        assert here.dirty() == []


@pytest.mark.parametrize("method", ["end_sync", "give_up"])
def test_an_interrupt_as_the_call_ends_leaves_no_update_that_waits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet_of(tmp_path, 2, link=Watched, timeout_s=90) as here:
        here.send()
        here.step()
        with monkeypatch.context() as patch:
            patch.setattr(FleetEngine, method, lambda *_: interrupt())
            if method == "give_up":
                here.link.before = at(1, "finish", interrupt)
            with pytest.raises(KeyboardInterrupt):
                here.send()
        here.step()
        stats = here.send()
        assert (stats.receivers, stats.lost) == (2, {})
        here.check("0", "1")


def test_one_engine_under_two_names_harms_nobody_else(tmp_path: Path) -> None:
    """Its workers follow whichever asked last; a URL spelt in two ways cannot be told apart."""
    with fleet_of(tmp_path, 2) as here:
        twin = here.servers["1"]

        class Twin(Server):
            def connect(self, connection: dict[str, object], /) -> None:
                twin.connect(connection)

            def update(self, version: int, holder: str, /) -> None:
                twin.update(version, holder)

            def name(self, version: int, holder: str, /) -> None:
                twin.name(version, holder)

        other = Twin(twin.module)
        here.fleet.add(other, paused=twin.paused, name="twin")
        for _ in range(4):
            here.step()
            outcome(here.send)
            assert here.servers["0"].holds(here.source)
            assert not here.servers["0"].is_paused
            assert here.dirty() == []
        here.fleet.remove("twin")
        here.catch_up()
        here.check("0", "1")


def test_a_second_caller_is_refused_and_costs_the_first_nothing(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.step()
        here.servers["1"].hangs = "update"
        found: list[object] = []
        first = Thread(target=lambda: found.append(outcome(here.send)))
        first.start()
        until(lambda: not here.servers["1"].hangs)
        for call in (here.fleet.send_weights, here.fleet.connect):
            with pytest.raises(ConfigError, match="under way"):
                call()
        assert set(here.fleet.servers()) == {"0", "1"}  # which may be asked at any time
        here.servers["1"].goes_on.set()
        first.join()
        assert not isinstance(found[0], DeltaSyncError), found
        here.check("0", "1")


@pytest.mark.parametrize("call", ["connect", "pause", "update", "resume", "disconnect"])
def test_closing_does_not_wait_for_a_server_that_hangs(call: str, tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2, timeout_s=6.0) as here:
        if call != "connect":
            here.send()
        here.step()
        here.servers["1"].hangs = call
        if call == "disconnect":
            here.fleet.remove("1")
            until(lambda: not here.servers["1"].hangs)
        else:
            outcome(here.send)
        closing = Thread(target=here.fleet.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()
        with pytest.raises(TransportClosed):
            here.send()
        assert not here.servers["0"].is_paused


def test_closing_says_which_server_stays_paused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        here.step()
        here.servers["1"].fails = "update"
        here.send()
        here.fleet.close()
        here.fleet.close()
    (said,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert said.message.startswith("1 was closed after an update that failed")
    assert here.servers["1"].is_paused


_FORKED = """
import os, sys, tempfile
from contextlib import contextmanager
from pathlib import Path
from deltasync.errors import DeltaSyncError, TransportClosed
from tests.worlds.fleets import fleet_of

with tempfile.TemporaryDirectory() as folder, fleet_of(Path(folder), 2) as here:
    here.send()
    before = [list(server.calls) for server in here.servers.values()]
    pid = os.fork()
    if pid == 0:
        here.fleet.disconnect()
        here.fleet.remove("1")
        try:
            here.send(timeout_s=5)
        except TransportClosed as error:
            print("forked" in str(error), flush=True)
        here.fleet.close()
        print([list(s.calls) for s in here.servers.values()] == before, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    here.step()
    print(here.send().receivers, flush=True)
    here.check("0", "1")
"""


@pytest.mark.promise("Children", "A child sends no requests to the engine and does not resume it.")
def test_a_child_asks_no_server_for_anything() -> None:
    done = run(_FORKED)
    assert done.stdout == "True\nTrue\n2\n", done.stderr


_WITHIN_ATEXIT = """
import atexit, tempfile
from deltasync import ModuleSource
from deltasync.errors import DeltaSyncError
from deltasync.integrations.fleet import EngineFleet
from deltasync.transports import collective
from tests.worlds.fleets import Server, model

fleet, server = EngineFleet(ModuleSource(model(0)), collective.Sender()), Server(model(1))
fleet.add(server)

def last() -> None:
    try:
        fleet.send_weights(timeout_s=5)
    except DeltaSyncError as error:
        print(type(error).__name__, "atexit" in str(error), server.calls)
    fleet.close()

atexit.register(last)
"""


def test_a_sync_within_atexit_is_refused_before_a_server_is_asked_for_anything() -> None:
    done = run(_WITHIN_ATEXIT)
    assert done.stdout == "ConfigError True []\n", done.stderr


def test_a_server_that_sleeps_is_left_alone_and_caught_up(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        asleep = here.servers["1"]
        held = asleep.module.get_parameter("a").clone()
        asleep.workers[0].sleep()
        for _ in range(2):
            here.step()
            stats = here.send()
            assert list(stats.lost) == ["1"]
            assert here.servers["0"].holds(here.source)
            assert asleep.module.get_parameter("a").equal(held)
        asleep.workers[0].wake()
        here.catch_up()
        here.check("0", "1")


def test_all_servers_asleep_keep_their_places(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 2) as here:
        here.send()
        for server in here.servers.values():
            server.workers[0].sleep()
        here.step()
        with pytest.raises(ConfigError, match="the engine's weights sleep"):
            here.send()
        for server in here.servers.values():
            server.workers[0].wake()
            server.calls.clear()
        stats = here.send()
        assert (stats.kind, stats.receivers, stats.joined) == ("delta", 2, 0)
        assert here.servers["0"].calls == ["pause", "update", "updated", "name", "resume"]
        here.check("0", "1")


def test_a_hook_takes_a_fleet_and_training_goes_on(tmp_path: Path) -> None:
    import torch

    from deltasync import sync_after_step

    with fleet_of(tmp_path, 2) as here:
        here.source.requires_grad_(True)
        optimizer = torch.optim.SGD(here.source.parameters(), lr=0.5)
        hook = sync_after_step(optimizer, here.fleet, on_busy="wait", on_error="raise")
        for _ in range(4):
            for weights in here.source.parameters():
                weights.grad = torch.ones_like(weights)
            optimizer.step()
        hook.remove()
        assert (hook.syncs, hook.failures) == (4, 0)
        here.check("0", "1")


def test_a_server_that_joins_while_training_goes_on_is_caught_up(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 1) as here:
        here.send()
        here.add(Server(model(8)), "late")
        here.fleet.refresh_source()
        read = Event()
        stats = here.send(on_source_read=read.set)
        assert read.is_set()
        assert (stats.kind, stats.receivers) == ("delta", 2)
        here.check("0", "late")


def test_a_server_that_hangs_as_all_sleep_keeps_nobody_else_paused(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 3, timeout_s=6.0) as here:
        here.send()
        for server in here.servers.values():
            server.workers[0].sleep()
        for name in ("1", "2"):
            here.servers[name].hangs = "resume"
        here.step()
        with pytest.raises(ConfigError, match="the engine's weights sleep"):
            here.send()
        assert not here.servers["0"].is_paused
        for server in here.servers.values():
            server.workers[0].wake()
            server.goes_on.set()
        here.catch_up()
        here.check("0", "1", "2")
