"""The trainer's side of vLLM's interface, against workers that are driven as vLLM drives them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from threading import Thread
from time import sleep
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deltasync import (
    CheckpointTensor,
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    sync_after_step,
)
from deltasync.config import network_secret
from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError, EngineFailed, SyncAborted, TransportTimeout
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import TrainerInfo, Work
from deltasync.integrations.vllm import AsyncClient, Client, VllmServer
from deltasync.integrations.vllm_core import update, write
from deltasync.integrations.worker import Worker
from deltasync.transports import collective, inprocess, shared_memory
from tests.worlds.links import Model, bits_equal, until

UPDATE = [
    "start",
    "update",
    "finish",
    "clear",
    "start",
    "update",
    "finish",
]  # the second names the version


def model(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model({"a": torch.randn(40, 16, generator=generator).bfloat16()})


class Server:
    """One worker, and the calls that reach it; `calls` are those that did."""

    def __init__(self, module: Model) -> None:
        self.module, self.calls, self.version = module, list[str](), "default"
        self.fails_to_update = self.fails_to_start = self.fails_to_clear = False
        self.is_updating = self.declines = self.fails_to_connect = False
        self.says: Exception | None = None
        self.worker = Worker()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        if "trainer" not in init_info:
            self.worker.disconnect(init_info["holder"])
            return
        connection = TrainerInfo.model_validate(init_info["trainer"])
        self.worker.check_awake()
        self.worker.disconnect()
        if self.declines:
            self.worker.decline(connection, torch.device("cpu"), ConfigError("planted"))
            return
        if self.fails_to_connect:
            if self.says is not None:
                self.worker.decline(connection, torch.device("cpu"), self.says)
            raise RuntimeError("Call to collective_rpc method failed")  # as vLLM's client does
        assert connection.checkpoint() == [CheckpointTensor("a", (40, 16), torch.bfloat16)]
        target = ModuleTarget(self.module)
        self.worker.connect(connection, target, torch.device("cpu"), rank=0, world=1)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        if self.fails_to_start or self.is_updating:
            raise RuntimeError("planted, or it is under way")
        self.is_updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        if self.fails_to_update:
            raise ConnectionError("planted")
        self.worker.commit(**update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        if not self.is_updating:
            raise RuntimeError("none is under way")
        self.is_updating = False
        if weight_version is not None:
            self.version = weight_version

    def clear_cache(self) -> None:
        self.calls.append("clear")
        assert not self.is_updating
        if self.fails_to_clear:
            raise EngineFailed("planted")


@contextmanager
def connected(source: Model, server: Server, path: Path, **options: Any) -> Iterator[EngineSync]:
    link = shared_memory.Sender(path / "socket")
    with EngineSync(ModuleSource(source), VllmServer(server), link, **options) as sync:
        sync.connect()
        yield sync
        server.worker.disconnect()


def test_an_update_is_asked_for_once_a_version_is_decided(tmp_path: Path) -> None:
    source, server = model(0), Server(model(1))
    with connected(source, server, tmp_path) as sync:
        assert sync.send_weights().full_synced == 1
        assert (server.calls, server.version) == (["init", *UPDATE], "1")
        for version in ("2", "3"):
            server.calls.clear()
            source.get_parameter("a").data.view(-1)[7] *= 2
            assert sync.send_weights().kind == "delta"
            assert (server.calls, server.version) == (UPDATE, version)
            assert bits_equal(source, server.module)


def test_an_engine_is_told_the_dtypes_in_which_tensors_travel(tmp_path: Path) -> None:
    source, server = model(0).float(), Server(model(1))
    options = SenderOptions(wire_dtypes={"*": "bfloat16"})
    with connected(source, server, tmp_path, options=options) as sync:  # which looks at them
        sync.send_weights()
        assert bits_equal(source.bfloat16(), server.module)


def test_an_engine_follows_an_optimizer_that_goes_on(tmp_path: Path) -> None:
    source, server = model(0).requires_grad_(True), Server(model(1))
    optimizer = torch.optim.SGD(source.parameters(), lr=0.5)
    with connected(source, server, tmp_path) as sync:
        hook = sync_after_step(optimizer, sync, on_busy="wait", on_error="raise")
        for _ in range(3):
            for weights in source.parameters():
                weights.grad = torch.ones_like(weights)
            optimizer.step()
        hook.remove()
        assert (hook.syncs, hook.failures, server.version) == (3, 0, "3")
        assert bits_equal(source, server.module)


def test_a_server_that_holds_the_weights_learns_their_version(tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path) as sync:
        assert sync.send_weights().full_synced == 0
        named = ["init", "clear", "start", "update", "finish"]
        assert (server.calls, server.version) == (named, "1")


def test_what_is_too_large_to_be_staged_is_received_in_the_update(tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path, max_staged_bytes=100) as sync:
        sync.send_weights()
        source.get_parameter("a").data.neg_()
        assert sync.send_weights().kind == "delta"
        assert bits_equal(source, server.module)
        assert server.version == "2"


@pytest.mark.promise(
    "Cost",
    "An engine is paused early only for a sync that may not fit into staging.",
)
def test_what_can_be_staged_pauses_the_engine_only_when_it_is_decided(tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    weights, decided = as_bits(source.get_parameter("a").data).view(-1), list[int]()

    @contextmanager
    def paused() -> Iterator[None]:
        decided.append(sync.sender.version)
        yield

    changed = 20  # of 640: sparse, 6 bytes each
    staged = {"max_staged_bytes": 2 * 6 * changed}  # positions of 8 bytes, new and old values
    with connected(source, server, tmp_path, paused=paused, **staged) as sync:
        sync.send_weights()
        for version, count in ((2, changed), (3, changed + 1)):
            weights[:count] += 1
            assert sync.send_weights().kind == "delta"
            assert bits_equal(source, server.module)
            assert sync.sender.version == version
    # The first, which it holds, in case another trainer has left it paused; the last began to
    # arrive before it was decided.
    assert decided == [1, 2, 2]


@pytest.mark.parametrize("what", ["fails_to_start", "fails_to_update"])
def test_an_update_that_is_not_made_is_told_and_made_up_for(what: str, tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path, timeout_s=4.0) as sync:
        sync.send_weights()
        before = [parameter.clone() for parameter in server.module.parameters()]
        source.get_parameter("a").data.view(-1)[7] *= 2
        setattr(server, what, True)
        with pytest.raises(SyncAborted):
            sync.send_weights()
        now = list(server.module.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert server.version == "1"
        setattr(server, what, False)
        stats = sync.send_weights()  # connects anew
        assert bits_equal(source, server.module)
        assert server.version == str(stats.version)


def test_a_cache_that_is_not_cleared_is_an_error_and_made_up_for(tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path) as sync:
        sync.send_weights()
        source.get_parameter("a").data.view(-1)[7] *= 2
        server.fails_to_clear = True
        with pytest.raises(EngineFailed, match="planted"):
            sync.send_weights()
        server.fails_to_clear = False
        server.calls.clear()
        sync.send_weights()  # the worker holds the weights already
        assert server.calls == ["init", "clear", "start", "update", "finish"]
        assert bits_equal(source, server.module)


def test_a_cache_that_a_trainer_did_not_clear_is_cleared_by_its_successor(tmp_path: Path) -> None:
    source, server = model(0), Server(model(1))
    server.fails_to_clear = True
    with connected(source, server, tmp_path) as sync, pytest.raises(EngineFailed, match="planted"):
        sync.send_weights()
    assert bits_equal(source, server.module)
    server.fails_to_clear = False
    server.calls.clear()
    with connected(source, server, tmp_path) as sync:
        assert sync.send_weights().full_synced == 0
    assert server.calls[:5] == ["init", "clear", "start", "update", "finish"]


class Late(Server):
    """A worker that declines an earlier trainer when the next one lets it connect."""

    earlier: TrainerInfo | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.earlier is not None:
            self.worker.decline(self.earlier, torch.device("cpu"), ConfigError("of the earlier"))
            sleep(0.5)
        super().init_weight_transfer_engine(init_info)
        self.earlier = TrainerInfo.model_validate(init_info["trainer"])


def test_why_a_worker_declined_an_earlier_trainer_is_not_heard_by_the_next(tmp_path: Path) -> None:
    source, server = model(0), Late(model(0))
    with connected(source, server, tmp_path) as sync:
        assert sync.send_weights().receivers == 1
    with connected(source, server, tmp_path) as sync:  # at the same address
        assert sync.send_weights().receivers == 1
        sync.connect()  # nor what an earlier call was to hear
        assert sync.send_weights().receivers == 1


def test_caches_are_kept_for_who_wants_that(tmp_path: Path) -> None:
    source, server = model(0), Server(model(1))
    link = shared_memory.Sender(tmp_path / "socket")
    with EngineSync(ModuleSource(source), VllmServer(server, caches="keep"), link) as sync:
        sync.send_weights()
        server.worker.disconnect()
    assert "clear" not in server.calls


def test_a_client_that_cannot_clear_caches_is_refused() -> None:
    """As vLLM's own cannot."""
    with pytest.raises(ConfigError, match=r"Without has no clear_cache.* or say caches=.keep."):
        VllmServer(cast("Client", Without()))
    VllmServer(cast("Client", Without()), caches="keep")


class Without:
    """Stands for a client of vLLM's own."""


def test_weights_that_others_touch_while_the_workers_are_disconnected_are_made_good(
    tmp_path: Path,
) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path) as sync:
        sync.send_weights()
        sync.disconnect()
        server.module.get_parameter("a").data.zero_()  # as when it sleeps
        server.calls.clear()
        assert sync.send_weights().full_synced == 1
        assert server.calls == ["init", *UPDATE]
        assert bits_equal(source, server.module)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Sleeping weights are not touched. Weights that were kept take the next delta.",
)
def test_weights_that_are_kept_in_a_sleep_take_the_next_delta(tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path) as sync:
        sync.send_weights()
        for _ in range(3):
            server.worker.sleep()
            source.get_parameter("a").data.view(-1)[7] *= 2
            server.worker.wake()
            server.calls.clear()
            stats = sync.send_weights()
            assert (stats.kind, stats.joined, stats.full_synced) == ("delta", 0, 0)
            assert server.calls == UPDATE  # nothing had to connect
            assert bits_equal(source, server.module)


def test_weights_that_have_changed_in_a_sleep_are_made_good(tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path) as sync:
        sync.send_weights()
        server.worker.sleep()
        server.module.get_parameter("a").data.zero_()
        server.worker.wake()
        with suppress(SyncAborted):  # unless the worker has seen it before
            sync.send_weights()
        assert sync.send_weights().receivers == 1
        assert bits_equal(source, server.module)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Sleeping weights are not touched. Weights that were kept take the next delta.",
)
@pytest.mark.parametrize("max_staged_bytes", [1 << 20, 1], ids=["staged", "in place"])
def test_weights_that_sleep_are_not_touched(max_staged_bytes: int, tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    options: dict[str, Any] = {"max_staged_bytes": max_staged_bytes, "timeout_s": 20.0}
    with connected(source, server, tmp_path, **options) as sync:
        sync.send_weights()
        before = [parameter.clone() for parameter in server.module.parameters()]
        source.get_parameter("a").data.neg_()
        server.worker.sleep()
        for _ in range(3):
            with pytest.raises(ConfigError, match="the engine's weights sleep"):
                sync.send_weights()
        now = list(server.module.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        server.worker.wake()
        server.calls.clear()
        stats = sync.send_weights()
        assert (stats.kind, stats.receivers, stats.joined) == ("delta", 1, 0)
        assert server.calls == UPDATE  # nothing had to connect
        assert bits_equal(source, server.module)


def test_a_worker_that_cannot_take_part_says_why(tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    link = shared_memory.Sender(tmp_path / "socket")
    with EngineSync(ModuleSource(source), VllmServer(server), link) as sync:
        for _ in range(2):
            server.declines = True
            with pytest.raises(ConfigError, match=r"^planted$"):
                sync.connect()
            server.declines = False
            sync.connect()
            assert sync.send_weights().receivers == 1
        server.worker.disconnect()


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "`connect` raises a worker's own `ConfigError`, whichever client is used.",
)
@pytest.mark.parametrize(
    ("said", "heard", "text"),
    [
        (ConfigError("w: no route"), ConfigError, "^w: no route$"),
        (OSError("no disk"), EngineFailed, "^OSError: no disk$"),
        (None, EngineFailed, r"^RuntimeError: Call to collective_rpc method failed$"),
    ],
)
def test_why_a_worker_declines_is_heard_from_itself_if_the_engine_does_not_pass_it_on(
    said: Exception | None, heard: type[Exception], text: str, tmp_path: Path
) -> None:
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path) as sync:
        sync.send_weights()
        server.fails_to_connect, server.says = True, said
        with pytest.raises(heard, match=text):
            sync.connect()
        server.fails_to_connect = False
        sync.connect()
        assert sync.send_weights().receivers == 1


@pytest.mark.promise(
    "Errors",
    "`EngineFailed`: whatever an engine raises becomes this error, and the next sync covers "
    "the version.",
)
def test_what_an_engine_raises_is_an_error_of_ours(tmp_path: Path) -> None:
    """`sync_after_step` goes on after those alone."""
    source, server = model(0), Server(model(0))
    with connected(source, server, tmp_path) as sync:
        server.fails_to_start = True
        with pytest.raises(EngineFailed, match=r"^RuntimeError: planted"):
            sync.send_weights()
        server.fails_to_start = False
        assert sync.send_weights().receivers == 1


@pytest.mark.promise(
    "Errors",
    "`EngineFailed`: whatever an engine raises becomes this error, and the next sync covers "
    "the version.",
)
@pytest.mark.parametrize("moment", ["pause", "resume"])
def test_what_pausing_raises_is_an_error_of_ours(moment: str, tmp_path: Path) -> None:
    source, server = model(0), Server(model(0))
    failing = ""

    @contextmanager
    def paused() -> Iterator[None]:
        if failing == "pause":
            raise RuntimeError("planted")
        yield
        if failing == "resume":
            raise RuntimeError("planted")

    with connected(source, server, tmp_path, paused=paused, timeout_s=4.0) as sync:
        sync.send_weights()
        source.get_parameter("a").data.neg_()
        failing = moment
        with pytest.raises((SyncAborted, EngineFailed)) as raised:
            sync.send_weights()
        said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
        assert any("RuntimeError: planted" in line for line in said)
        failing = ""
        assert sync.send_weights().receivers == 1
        assert bits_equal(source, server.module)


@pytest.mark.promise("Time", "Calls of an asynchronous vLLM are bounded.")
def test_a_call_of_an_asynchronous_engine_is_bounded() -> None:
    class Engine:
        is_ended = False

        async def start_weight_update(self) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                self.is_ended = True

    loop, engine = asyncio.new_event_loop(), Engine()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        with pytest.raises(TransportTimeout, match=r"vLLM did not answer in 0\.2 s"):
            AsyncClient(engine, loop, timeout_s=0.2).start_weight_update()
        until(lambda: engine.is_ended)  # it goes on in vLLM no longer
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_engine_that_an_earlier_trainer_left_behind_takes_no_part(tmp_path: Path) -> None:
    source, left, server = model(0), Server(model(0)), Server(model(0))
    link = shared_memory.Sender(tmp_path / "socket")
    with EngineSync(ModuleSource(source), VllmServer(left), link) as sync:
        sync.send_weights()
    with connected(source, server, tmp_path, timeout_s=4.0) as sync:
        for _ in range(4):
            sleep(0.3)  # it comes back by itself, where another trainer listens now
            source.get_parameter("a").data.view(-1)[7] *= 2
            assert sync.send_weights().receivers == 1
            assert bits_equal(source, server.module)
    left.worker.disconnect()
    assert not bits_equal(source, left.module)


@pytest.mark.promise("Security", "Engine workers read their secret from `DELTASYNC_SECRET`.")
def test_workers_take_their_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    source, server = model(0), Server(model(1))
    monkeypatch.setenv("DELTASYNC_SECRET", "of both ends")
    link = collective.Sender("127.0.0.1", secret=network_secret())
    with EngineSync(ModuleSource(source), VllmServer(server), link, timeout_s=6.0) as sync:
        monkeypatch.delenv("DELTASYNC_SECRET")
        with pytest.raises(TransportTimeout):
            sync.send_weights()
        assert not bits_equal(source, server.module)
        monkeypatch.setenv("DELTASYNC_SECRET", "of both ends")
        assert sync.send_weights().receivers == 1
        assert bits_equal(source, server.module)
        server.worker.disconnect()


def test_workers_cannot_connect_to_any_transport() -> None:
    with pytest.raises(ConfigError, match="cannot connect"):
        EngineSync(ModuleSource(model(0)), VllmServer(Server(model(0))), inprocess.Sender())


@pytest.mark.parametrize("work", ["write", "pass", "name"])
def test_a_core_waits_for_its_steps_only_if_weights_change(
    monkeypatch: pytest.MonkeyPatch, work: Work
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: seen.append("waits"))
    worker = SimpleNamespace(
        start_weight_update=lambda: None,
        update_weights=seen.append,
        finish_weight_update=lambda: None,
    )
    assert write(worker, 7, work, "me") == ""
    asked = {"version": 7, "work": work, "holder": "me"}
    assert seen == ["waits"] * (work == "write") + [asked]


class State(Enum):
    UNPAUSED = 0
    PAUSED_ALL = 1


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("work", ["write", "pass", "name"])
def test_a_core_that_is_anothers_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, before: State, work: Work
) -> None:
    interface = ModuleType("vllm.v1.core.sched.interface")
    vars(interface)["PauseState"] = State
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    named: list[str] = []
    said = ["", "EngineTaken: another trainer has it; or take_over=True"]

    class Core:
        batch_queue = None
        scheduler = SimpleNamespace(pause_state=before)
        model_executor = SimpleNamespace(collective_rpc=lambda method, args: said)
        set_weight_version = named.append

    core = Core()
    core.scheduler.set_pause_state = lambda state: vars(core.scheduler).update(pause_state=state)
    with pytest.raises(EngineFailed, match="EngineTaken"):
        update(core, 2, work, "keep", True, "me")
    assert (core.scheduler.pause_state, named) == (before, [])
