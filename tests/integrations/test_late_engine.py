"""Engines that fail to pause or to resume, answer late, or are used by two threads at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar

import pytest
import torch

from deltasync import ModuleSource, ModuleTarget
from deltasync.delta.host.staging import Staging
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    EngineFailed,
    ReceiversLost,
    SyncAborted,
    TargetMoved,
    TransportTimeout,
)
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import TrainerInfo, Work
from deltasync.integrations.worker import Worker
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.testing.links import PROMPT_S, within
from deltasync.transports import shared_memory
from tests.worlds.links import Model, bits_equal, random_model, until


class Derived(ModuleTarget):
    """Weights of which the engine derives others, which fails while `fails`."""

    fails: ClassVar[bool] = False
    derived: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, module: Model) -> None:
        super().__init__(module)
        self._of = module

    def finish(self, changed: Collection[int] | None = None) -> None:
        if Derived.fails:
            raise TargetMoved("planted")
        super().finish(changed)
        Derived.derived = {name: each.data * 2 for name, each in self._of.named_parameters()}


class Server:
    """An engine of one worker. `calls` are those that it was asked, in their order."""

    def __init__(self, module: Model) -> None:
        self.module, self.worker, self.calls = module, Worker(), list[str]()
        self.fails = ""  # the call that does, once
        self.hangs, self.goes_on = "", Event()
        self.is_paused, self.version = False, 0
        self.target: type[ModuleTarget] = ModuleTarget

    def connect(self, connection: dict[str, Any], /) -> None:
        self._at("connect")
        to = TrainerInfo.model_validate(connection)
        self.worker.disconnect()
        self.worker.connect(to, self.target(self.module), torch.device("cpu"), rank=0, world=1)

    def update(self, version: int, holder: str, /) -> None:
        self._at("update")
        self.worker.commit(version, holder)
        self._at("updated")
        assert self.is_paused

    def name(self, version: int, holder: str, /) -> None:
        self._at("name")
        self.version = version

    def disconnect(self, holder: str, /) -> None:
        self.worker.disconnect(holder)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._at("pause")
        self.is_paused = True
        yield
        self._at("resume")
        self.is_paused = False

    def _at(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            self.fails = ""
            raise RuntimeError("planted")
        if call == self.hangs:
            self.hangs = ""
            self.goes_on.wait(30)


class OneCall(Server):
    """An engine that pauses, writes, names and resumes in one call."""

    def reach(self, paused: Callable[[], object], /) -> int:
        assert paused == self.paused
        return 1

    def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> None:
        assert stays_paused
        self._at(work)
        self.is_paused = self.is_paused or work == "write"
        try:
            if work != "name":
                self.worker.commit(version, holder, work=work)
            self._at("written")
        except BaseException:
            self.is_paused = True
            raise
        self.version, self.is_paused = version, False


@contextmanager
def connected(
    path: Path, *, timeout_s: float = 5.0, kind: type[Server] = Server
) -> Iterator[tuple[EngineSync, Model, Server]]:
    """With an engine that holds version 1, and a source that has changed since."""
    source = random_model({"a": (8, 4)}, 0)
    server, link = kind(random_model({"a": (8, 4)}, 1)), shared_memory.Sender(path / "socket")
    with EngineSync(
        ModuleSource(source), server, link, paused=server.paused, timeout_s=timeout_s
    ) as sync:
        sync.send_weights()
        source.get_parameter("a").data[0] *= 2
        server.calls.clear()
        yield sync, source, server
        server.goes_on.set()
        server.worker.disconnect()


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except DeltaSyncError as error:
        return error


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine that failed to resume is resumed by the next sync, or by `close`.",
)
def test_an_engine_that_did_not_resume_does_when_it_holds_the_weights(tmp_path: Path) -> None:
    with connected(tmp_path) as (sync, source, server):
        server.fails = "resume"
        with pytest.raises(EngineFailed, match="RuntimeError: planted"):
            sync.send_weights()
        assert server.is_paused
        assert sync.send_weights().full_synced == 0  # there is nothing to write
        assert bits_equal(source, server.module)
        assert not server.is_paused


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine that failed to resume is resumed by the next sync, or by `close`.",
)
def test_close_resumes_an_engine_that_did_not_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(tmp_path) as (sync, _, server):
        server.fails = "resume"
        with pytest.raises(EngineFailed):
            sync.send_weights()
        sync.close()
        assert not server.is_paused
    assert not any(one.levelno == logging.ERROR for one in caplog.records)


def test_close_says_that_an_engine_does_not_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(tmp_path) as (sync, _, server):
        for _ in range(2):
            server.fails = "resume"
            with pytest.raises(EngineFailed):
                sync.send_weights()
        server.fails = "pause"
        sync.close()
        sync.close()
    (said,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "stays paused" in said.message
    assert server.is_paused


def test_an_engine_that_was_restarted_in_its_pause_is_paused_again(tmp_path: Path) -> None:
    with connected(tmp_path) as (sync, source, server):
        server.fails = "updated"
        assert isinstance(outcome(sync.send_weights), DeltaSyncError)
        assert server.is_paused
        server.worker.disconnect()
        server.module.get_parameter("a").data.zero_()
        server.worker, server.is_paused = Worker(), False  # another process, which generates
        assert sync.send_weights().full_synced == 1  # `update` asserts that it is paused
        assert bits_equal(source, server.module)
        assert not server.is_paused


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine's late update ends before the next one begins.",
)
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        *((call, Server) for call in ("pause", "update", "updated", "name", "resume")),
        *((call, OneCall) for call in ("write", "written")),
    ],
)
def test_an_update_that_ends_late_ends_before_the_next_one_begins(
    call: str, kind: type[Server], tmp_path: Path
) -> None:
    with connected(tmp_path, timeout_s=1.0, kind=kind) as (sync, source, server):
        server.hangs = call
        said = outcome(sync.send_weights)
        assert isinstance(said, DeltaSyncError), said
        before = list(server.calls)
        with pytest.raises(TransportTimeout, match="the engine's last update has not ended"):
            sync.send_weights()
        assert server.calls == before  # it was asked for nothing
        server.goes_on.set()
        assert sync.send_weights(timeout_s=30).receivers == 1
        assert bits_equal(source, server.module)
        assert not server.is_paused
        assert server.version == sync.sender.version
        if call == "pause":  # what was too late then is not asked for
            assert server.calls[:3] == ["pause", "resume", "connect"]


def test_a_second_thread_is_refused_and_costs_the_first_nothing(tmp_path: Path) -> None:
    with connected(tmp_path) as (sync, source, server):
        for call in ("connect", "update"):
            if call == "connect":
                sync.disconnect()
            server.hangs = call
            server.goes_on.clear()
            found: list[object] = []
            first = Thread(target=lambda kept=found: kept.append(outcome(sync.send_weights)))
            first.start()
            until(lambda: not server.hangs)
            for other in (sync.send_weights, sync.connect):
                with pytest.raises(ConfigError, match="under way"):
                    other()
            assert not found  # the first call waits still
            server.goes_on.set()
            first.join()
            assert not isinstance(found[0], Exception), found
            assert bits_equal(source, server.module)
            source.get_parameter("a").data[0] *= 2


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
    with connected(tmp_path, kind=kind) as (sync, source, server):
        server.target = Derived
        sync.disconnect()
        sync.send_weights()
        held = server.version
        source.get_parameter("a").data[1] *= 2
        monkeypatch.setattr(Derived, "fails", True)
        if not undoes:
            monkeypatch.setattr(Staging, "undo", fails_to_undo)
        for _ in range(2):
            with pytest.raises(SyncAborted, match=r"DirtyReceiver: .*planted"):
                sync.send_weights()
            assert server.is_paused
            assert server.version == held
        monkeypatch.setattr(Derived, "fails", False)
        assert sync.send_weights().receivers == 1
        assert bits_equal(source, server.module)
        assert torch.equal(Derived.derived["a"], source.get_parameter("a") * 2)
        assert not server.is_paused
        assert server.version == sync.sender.version


def fails_to_undo(staging: Staging) -> None:
    raise RuntimeError("planted")


def test_a_worker_that_was_lost_raises_once_the_engine_has_the_version(tmp_path: Path) -> None:
    with connected(tmp_path) as (sync, source, server):
        receiver = server.worker._receiver
        assert receiver is not None
        receiver.invalidate()
        until(lambda: receiver.state is ReceiverState.JOINING)  # again
        with pytest.raises(ReceiversLost, match=r"engine-\w+-0\[0/1\]: ") as caught:
            sync.send_weights(on_lost="raise")
        assert caught.value.stats.receivers == 1
        assert server.version == caught.value.stats.version
        assert bits_equal(source, server.module)


def test_a_total_timeout_covers_the_wait_for_the_last_update(tmp_path: Path) -> None:
    with connected(tmp_path, timeout_s=60) as (sync, _, server), within(PROMPT_S):
        server.hangs = "update"
        with pytest.raises(DeltaSyncError):
            sync.send_weights(total_timeout_s=0.5)
        with pytest.raises(TransportTimeout, match="last update has not ended"):
            sync.send_weights(total_timeout_s=0.5)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An update of a running vLLM takes one call where that is safe.",
)
def test_an_update_in_one_call_is_asked_for_nothing_else(tmp_path: Path) -> None:
    with connected(tmp_path, kind=OneCall) as (sync, source, server):
        for work in ("write", "pass", "write", "pass", "pass"):
            server.calls.clear()
            if work == "write":
                source.get_parameter("a").data[0] *= 2
            assert sync.send_weights().receivers == 1
            assert server.calls == [work, "written"]
            assert bits_equal(source, server.module)
            assert (server.version, server.is_paused) == (sync.sender.version, False)
        sync.connect()
        server.calls.clear()
        assert sync.send_weights().joined == 1
        assert server.calls == ["pause", "name", "written", "resume"]  # as after another trainer


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A vLLM whose update failed stays paused until one succeeds, even if the trainer dies.",
)
@pytest.mark.parametrize("call", ["write", "written"])
def test_an_update_in_one_call_that_fails_is_paused_for_until_the_next(
    call: str, tmp_path: Path
) -> None:
    with connected(tmp_path, timeout_s=2.0, kind=OneCall) as (sync, source, server):
        server.fails = call
        said = outcome(sync.send_weights)
        assert isinstance(said, DeltaSyncError)
        assert "planted" in f"{said} {getattr(said, '__notes__', '')}"
        assert server.is_paused
        assert sync.send_weights().receivers == 1
        assert not server.is_paused
        assert bits_equal(source, server.module)
        assert server.version == sync.sender.version


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A version that changes nothing is named without a pause, and cached prefixes stay.",
)
def test_a_version_that_changes_weights_is_not_written_without_a_pause(tmp_path: Path) -> None:
    with connected(tmp_path, timeout_s=2.0) as (sync, source, server):
        before = server.module.get_parameter("a").clone()
        server.update = lambda version, holder: server.worker.commit(version, holder, work="pass")  # type: ignore[method-assign]
        said = outcome(sync.send_weights)
        assert isinstance(said, DeltaSyncError)
        assert "was said to change none" in f"{said} {getattr(said, '__notes__', '')}"
        assert torch.equal(server.module.get_parameter("a"), before)
        assert not bits_equal(source, server.module)


def test_an_engine_of_which_one_call_reaches_some_workers_is_asked_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneCall, "reach", lambda *_: 2)
    with connected(tmp_path, kind=OneCall) as (sync, source, server):
        sync.send_weights()
        assert server.calls == ["pause", "update", "updated", "name", "resume"]
        assert bits_equal(source, server.module)


@pytest.mark.parametrize("kind", [Server, OneCall])
def test_a_full_sync_pauses_when_its_first_payload_is_ready(
    kind: type[Server], tmp_path: Path
) -> None:
    """Memory for payloads is allocated, and shared with the engine, when the first is packed."""
    server = kind(random_model({"a": (8, 4)}, 1))

    class Noting(shared_memory.Sender):
        def buffer(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
            server.calls.append("buffer")
            return super().buffer(num_bytes, timeout_s=timeout_s)

    source, link = ModuleSource(random_model({"a": (8, 4)}, 0)), Noting(tmp_path / "socket")
    with EngineSync(source, server, link, paused=server.paused, timeout_s=5) as sync:
        assert sync.send_weights().full_synced == 1
        assert server.calls[:3] == ["connect", "buffer", "write" if kind is OneCall else "pause"]
        server.worker.disconnect()
