"""One engine: what its calls do, fail in, and end with."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, ClassVar

import pytest
import torch

from deltasync import ModuleTarget, SyncStats, subscribe
from deltasync.config import network_secret
from deltasync.delta.bits import as_bits
from deltasync.delta.staging import Staging, staged_bytes_of
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    EngineFailed,
    SyncAborted,
    TargetMoved,
    TransportError,
    TransportTimeout,
)
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.testing.links import PROMPT_S, within
from deltasync.transports import collective
from deltasync.wire.changes import Sizes
from tests.worlds.fleets import (
    CALLS,
    CPU,
    OneCall,
    Server,
    Watched,
    at,
    engine_of,
    hung,
    in_thread,
    outcome,
)
from tests.worlds.links import until
from tests.worlds.programs import run


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Workers whose trainer is gone log warnings beside them."""
    return [one.message for one in caplog.records if one.levelno == logging.ERROR]


@pytest.mark.promise(
    "Cost",
    "An engine is paused early only for a sync that may not fit into staging.",
)
def test_what_can_be_staged_pauses_the_engine_only_when_it_is_decided(tmp_path: Path) -> None:
    changed, decided = 20, list[int]()

    @contextmanager
    def paused() -> Iterator[None]:
        decided.append(here.sync.sender.version)
        with here.servers["0"].paused():
            yield

    options: dict[str, Any] = {"shapes": {"a": (40, 16)}, "is_same": True, "paused": paused}
    payload_bytes = Sizes(2, tiles=1, places=changed, whole=0).num_bytes
    staged = staged_bytes_of(payload_bytes=payload_bytes, places=changed)
    with engine_of(tmp_path, max_staged_bytes=staged, link=Watched, **options) as here:
        here.send()
        weights = as_bits(here.source.get_parameter("a").data).view(-1)
        for count in (changed, changed + 1):
            weights[:count] += 1
            assert here.send().kind == "delta"
            here.check()
    # The first, which it holds, in case another trainer has left it paused; the last began to
    # arrive before it was decided.
    assert decided == [1, 2, 2]


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An update of a running vLLM takes one call where that is safe.",
)
def test_an_update_in_one_call_is_asked_for_nothing_else(tmp_path: Path) -> None:
    with engine_of(tmp_path, kind=OneCall) as here:
        here.send()
        server = here.servers["0"]
        assert isinstance(server, OneCall)
        for work in ("write", "pass", "write", "pass", "pass"):
            server.calls.clear()
            server.works.clear()
            assert (here.train if work == "write" else here.send)().receivers == 1
            assert (server.works, server.calls) == ([work], ["switch"])
            here.check()
        here.sync.connect()
        server.calls.clear()
        assert here.send().joined == 1
        assert server.works[-1] == "name"
        assert server.calls == ["pause", "switch", "resume"]  # as after another trainer


FAILURES = [  # in a call: whether it is paused then, and after a close
    (Server, "connect", False, False),
    (Server, "connected", False, False),
    (Server, "pause", False, False),
    (Server, "paused", True, False),
    (Server, "update", True, True),
    (Server, "updated", True, False),
    (Server, "name", False, False),
    (Server, "named", False, False),
    (Server, "resume", True, False),
    (Server, "resumed", False, False),
    (OneCall, "switch", True, True),
    (OneCall, "switched", True, False),
]


@pytest.mark.promise(
    "Errors",
    "`EngineFailed`: whatever an engine raises becomes this error, and the next sync covers "
    "the version.",
)
@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine that failed to resume is resumed by the next sync, or by `close`.",
)
@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A vLLM whose update failed stays paused until one succeeds, even if the trainer dies.",
)
@pytest.mark.parametrize(("kind", "call", "is_paused", "stays_paused"), FAILURES)
def test_what_an_engine_fails_in_is_an_error_of_ours_reported_once_and_made_up_for(
    kind: type[Server],
    call: str,
    is_paused: bool,
    stays_paused: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine_of(tmp_path, kind=kind, timeout_s=3.0) as here:
        server = here.servers["0"]
        here.send(timeout_s=60)

        def fail() -> None:
            if call.startswith("connect"):
                here.sync.disconnect()
                server.module.get_parameter("a").data.zero_()  # as others may then
            server.fails = call
            server.calls.clear()
            error = outcome(here.train)
            assert isinstance(error, EngineFailed | SyncAborted), error
            assert "planted" in f"{error} {getattr(error, '__notes__', '')}"

        with subscribe(lambda event: server.calls.append(type(event).__name__)):
            fail()
            assert server.calls[-1] == "SyncFailed"
            assert server.calls.count("SyncFailed") + server.calls.count("SyncStats") == 1
            assert server.is_paused == is_paused
            if is_paused:
                assert all(state.is_paused for state in here.fleet.servers().values())
            server.calls.clear()
            assert here.send(timeout_s=60).receivers == 1
            here.check()
            first = next(call for call in server.calls if call != "ReceiveStats")  # may come late
            assert (first, server.calls.count("SyncStats")) == ("connect", 1)
            last = "switch" if kind is OneCall else "resume"
            assert server.calls.index("SyncStats") > server.calls.index(last)
        fail()
        here.sync.close()
        here.sync.close()
        assert server.is_paused == stays_paused
        assert len(errors_in(caplog)) == stays_paused
        assert all("stays paused" in said for said in errors_in(caplog))


@pytest.mark.promise(
    "All or nothing",
    "An engine that was restarted in its pause is paused again before it is written.",
)
def test_an_engine_that_was_restarted_in_its_pause_is_paused_again(tmp_path: Path) -> None:
    with engine_of(tmp_path) as here:
        here.send()
        server = here.servers["0"]
        server.fails = "updated"
        outcome(here.train)
        assert server.is_paused
        server.die()
        server.start()  # and it generates; `update` asserts that it is paused
        server.module.get_parameter("a").data.zero_()
        here.catch_up()
        here.check()
        assert not any(state.is_paused for state in here.fleet.servers().values())


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine's late update ends before the next one begins.",
)
@pytest.mark.parametrize(
    ("kind", "call"), [*((Server, call) for call in CALLS), (OneCall, "switch")]
)
def test_an_update_that_ends_late_ends_before_the_next_one_begins(
    kind: type[Server], call: str, tmp_path: Path
) -> None:
    with engine_of(tmp_path, timeout_s=1.0, kind=kind) as here:
        here.send(timeout_s=60)
        server = here.servers["0"]
        server.hangs = call
        server.calls.clear()
        assert isinstance(outcome(here.train), DeltaSyncError)
        before = list(server.calls)
        for _ in range(2):
            with pytest.raises(TransportTimeout, match="the engine's last update has not ended"):
                here.send(total_timeout_s=0.5)
        assert server.calls == before  # it was asked for nothing
        server.goes_on.set()
        assert here.send(timeout_s=60).receivers == 1
        here.check()
        if call == "pause":  # what was too late then is not asked for
            assert server.calls[:3] == ["pause", "resume", "connect"]


@pytest.mark.parametrize("fails", ["updated", ""], ids=["a mixture", "whole"])
def test_close_while_an_update_is_under_way_leaves_a_mixture_paused_and_nothing_else(
    fails: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(tmp_path, timeout_s=2.0) as here:
        here.send(timeout_s=60)
        server = here.servers["0"]
        server.hangs, server.fails = "update", fails
        outcome(here.train)
        here.sync.close()
        assert (server.is_paused, errors_in(caplog)) == (True, [])
        server.goes_on.set()
        until(lambda: bool(errors_in(caplog)) or not server.is_paused)
    assert server.is_paused == bool(fails)
    assert len(errors_in(caplog)) == bool(fails)


def test_a_second_thread_is_refused_and_costs_the_first_nothing(tmp_path: Path) -> None:
    with engine_of(tmp_path) as here:
        server = here.servers["0"]
        server.hangs = "update"
        with in_thread(partial(outcome, here.train)) as found:
            hung(server)
            for other in (here.sync.send_weights, here.sync.connect):
                with pytest.raises(ConfigError, match="under way"):
                    other()
            here.states()  # which may be asked at any time
            assert not found  # the first call waits still
            server.goes_on.set()
        assert isinstance(found[0], SyncStats), found
        here.check()


class Stuck(ModuleTarget):
    """Weights of which nothing ends well while `fails`, not even that old ones are put back."""

    fails: ClassVar[bool] = False

    def finish(self, changed: Collection[int] | None = None) -> None:
        if Stuck.fails:
            raise TargetMoved("planted")
        super().finish(changed)


def let_connect(server: Server, worker: Worker, to: TrainerInfo, rank: int) -> None:
    worker.connect(to, Stuck(server.module), CPU, rank=0, world=1)


def fails_to_undo(staging: Staging) -> None:
    raise RuntimeError("planted")


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine whose update raised stays paused until a sync has ended. A worker that could "
    "not put old weights back gets a full sync.",
)
@pytest.mark.parametrize("kind", [Server, OneCall])
@pytest.mark.parametrize("undoes", [True, False], ids=["finish fails", "nothing is undone"])
def test_an_engine_of_which_a_write_was_not_undone_stays_paused_until_it_is_whole(
    undoes: bool, kind: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "let_connect", let_connect)
    with engine_of(tmp_path, kind=kind) as here:
        here.send()
        with monkeypatch.context() as patch:
            patch.setattr(Stuck, "fails", True)
            if not undoes:
                patch.setattr(Staging, "undo", fails_to_undo)
            for _ in range(2):
                with pytest.raises(SyncAborted, match=r"DirtyReceiver: .*planted"):
                    here.train()
                assert (here.servers["0"].is_paused, here.servers["0"].version) == (True, 1)
        stats = here.send()
        assert (stats.receivers, stats.full_synced) == (1, 1)
        here.check()


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A version that changes nothing is named without a pause, and cached prefixes stay.",
)
def test_a_version_that_changes_weights_is_not_written_without_a_pause(tmp_path: Path) -> None:
    class Passes(Server):
        def update(self, version: int, holder: str, /) -> None:
            self.commit(version, holder, "write" if version == 1 else "pass")

    with engine_of(tmp_path, timeout_s=2.0, kind=Passes) as here:
        here.send(timeout_s=60)
        before = here.servers["0"].module.get_parameter("a").clone()
        error = outcome(here.train)
        assert isinstance(error, DeltaSyncError)
        assert "was said to change none" in f"{error} {getattr(error, '__notes__', '')}"
        assert torch.equal(here.servers["0"].module.get_parameter("a"), before)


def test_a_worker_whose_trainer_is_gone_does_not_wait_for_its_version(tmp_path: Path) -> None:
    with engine_of(tmp_path, timeout_s=90.0) as here, within(PROMPT_S):
        here.send()
        Timer(0.2, here.sync.sender.close).start()
        for _ in range(2):  # the second time it is known before
            with pytest.raises(TransportError):
                here.servers["0"].commit(2, here.holder)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Sleeping weights are not touched. Weights that were kept take the next delta.",
)
@pytest.mark.parametrize("max_staged_bytes", [1 << 20, 1], ids=["staged", "in place"])
def test_weights_that_sleep_are_not_touched_and_take_the_next_delta(
    max_staged_bytes: int, tmp_path: Path
) -> None:
    with engine_of(tmp_path, max_staged_bytes=max_staged_bytes) as here:
        here.send()
        server = here.servers["0"]
        worker, held = server.workers[0], server.module.get_parameter("a").clone()
        worker.sleep()
        for server.fails in ("", "paused", "updated"):
            with pytest.raises(ConfigError, match="the engine's weights sleep"):
                here.train()
            until(lambda: not server.is_paused)
            assert server.module.get_parameter("a").equal(held)
        server.fails = ""
        for _ in range(2):  # the second time nothing was sent meanwhile
            worker.wake()
            server.calls.clear()
            stats = here.send()
            assert (stats.kind, stats.receivers, stats.joined) == ("delta", 1, 0)
            assert server.calls == CALLS  # nothing had to connect
            here.check()
            worker.sleep()
            here.step()
        server.module.get_parameter("a").data.zero_()
        worker.wake()
        outcome(here.send)  # unless the worker has seen it before
        assert here.send().receivers == 1
        here.check()


class Quiet(Server):
    """As clients of vLLM's that wait for no answer."""

    def connect(self, connection: dict[str, Any], /) -> None:
        with suppress(RuntimeError):
            super().connect(connection)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "`connect` raises a worker's own `ConfigError`, whichever client is used.",
)
@pytest.mark.parametrize("kind", [Server, Quiet])
@pytest.mark.parametrize(
    ("said", "heard", "text"),
    [
        (ConfigError("w: no route"), ConfigError, "^w: no route$"),
        (OSError("no disk"), EngineFailed, "^OSError: no disk$"),
    ],
)
def test_why_a_worker_declines_is_heard_from_itself(
    said: Exception, heard: type[Exception], text: str, kind: type[Server], tmp_path: Path
) -> None:
    with engine_of(tmp_path, kind=kind) as here:
        here.send()
        for _ in range(2):
            here.servers["0"].declines = said
            with pytest.raises(heard, match=text):
                here.sync.connect()
            here.servers["0"].declines = None
            here.sync.connect()
            assert here.train().receivers == 1
            here.check()


def test_an_engine_may_prove_for_longer_than_a_wait_takes(tmp_path: Path) -> None:
    with engine_of(tmp_path, timeout_s=2.0) as here:
        here.servers["0"].before = at(1, "connect", lambda: time.sleep(3.0))
        assert here.send().receivers == 1
        here.check()


@pytest.mark.promise("Security", "Engine workers read their secret from `DELTASYNC_SECRET`.")
def test_workers_take_their_secret_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTASYNC_SECRET", "of both ends")
    link = collective.Sender("127.0.0.1", secret=network_secret())
    with engine_of(tmp_path, link=lambda path: link, timeout_s=3.0) as here:
        monkeypatch.delenv("DELTASYNC_SECRET")
        with pytest.raises(TransportTimeout):
            here.send()
        assert not here.servers["0"].holds(here.source)
        monkeypatch.setenv("DELTASYNC_SECRET", "of both ends")
        assert here.send(timeout_s=60).receivers == 1
        here.check()


_IN_A_PROCESS = """
import atexit, os, tempfile
from pathlib import Path
from tests.worlds.fleets import engine_of, outcome

folder = tempfile.TemporaryDirectory()
context = engine_of(Path(folder.name))
here = context.__enter__()
server = here.servers["0"]
here.send()
server.fails = "resume"
outcome(here.train)
before = list(server.calls)
pid = os.fork()
if pid == 0:
    here.sync.disconnect()
    result = outcome(lambda: here.send(timeout_s=60))
    print(type(result).__name__, "forked" in str(result), flush=True)
    here.sync.close()
    print(server.calls == before, server.is_paused, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
here.catch_up()
here.check()

def last():
    result = outcome(lambda: here.send(timeout_s=60))
    print(type(result).__name__, "atexit" in str(result), server.calls)
    here.sync.close()

server.calls.clear()
atexit.register(last)
"""


@pytest.mark.promise("Children", "A child sends no requests to the engine and does not resume it.")
def test_a_child_and_a_program_that_ends_ask_nothing_of_the_engine() -> None:
    done = run(_IN_A_PROCESS)
    assert done.stdout == "TransportClosed True\nTrue True\nConfigError True []\n", done.stderr
