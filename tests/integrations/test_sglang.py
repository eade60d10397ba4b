"""SGLang's workers answer what is wrong with an order; none of it ends the server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

from deltasync import ModuleSource, ModuleTarget
from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.sglang import Extension, SglangServer, worker_of
from deltasync.integrations.sglang_scheduler import _AROUND
from deltasync.integrations.trainer_info import TrainerInfo, WorkerRequest
from deltasync.transports import shared_memory
from deltasync.transports.address import Address
from tests.integrations.served import Engine, served
from tests.worlds.fleets import model
from tests.worlds.links import bits_equal, random_model


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of it an order asks for."""
    context = ModuleType("sglang.srt.runtime_context")
    waits = SimpleNamespace(checkpoint_engine_wait_weights_before_ready=False)
    context.get_server_args = lambda: waits  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)


def give(text: str, *, is_draft_worker: bool = False) -> None:
    runner = SimpleNamespace(model=nn.Linear(2, 2), is_draft_worker=is_draft_worker)
    Extension(runner).update_weights_from_ipc({"deltasync": text})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "deltasync: ValidationError"),
        ("{", "deltasync: ValidationError"),
        ('{"version": "seven"}', "version"),
        ('{"version": 7}', "deltasync: ConfigError: no trainer is connected"),
        ('{"unknown": 7}', "unknown"),
        ('{"trainer": {"addresses": [{"link": "pigeon"}]}}', "pigeon"),
    ],
)
def test_orders_that_make_no_sense_are_answered(text: str, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        give(text)
    give(text, is_draft_worker=True)  # which keeps its weights


def test_a_socket_of_a_parameter_server_is_answered_where_checkpoint_engine_is_missing() -> None:
    runner = SimpleNamespace(model=nn.Linear(2, 2), is_draft_worker=False)
    with pytest.raises(EngineFailed, match="checkpoint-engine cannot be imported"):
        Extension(runner).update_weights_from_ipc({"GPU-1": "ipc://socket"})


class Worker:
    """A server of one worker, which is not SGLang's: it has no loader to watch."""

    def connect(self, connection: dict[str, Any], /) -> None:
        asked = WorkerRequest(trainer=TrainerInfo.model_validate(connection))
        give(asked.model_dump_json())

    def update(self, version: int, holder: str, /) -> None: ...

    def name(self, version: int, holder: str, /) -> None: ...

    def disconnect(self, holder: str, /) -> None: ...


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "`connect` raises a worker's own `ConfigError`, whichever client is used.",
)
def test_a_worker_that_cannot_connect_tells_the_trainer(tmp_path: Path) -> None:
    source = ModuleSource(random_model({"a": (3,)}, 0))
    link = shared_memory.Sender(tmp_path / "socket")
    with (
        EngineSync(source, Worker(), link) as sync,
        pytest.raises(EngineFailed, match="load_weights"),
    ):
        sync.connect()


class Handler(BaseHTTPRequestHandler):
    """Answers as SGLang does; `info` of the server, and what was `asked` of it."""

    info: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[tuple[str, Any]]] = []
    fails: ClassVar[bool] = False

    def do_GET(self) -> None:
        self.answer(200, {"dp_size": 1, "tp_size": 2, "pp_size": 1} | self.info)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body.get("flush_cache")))
        self.answer(400 if self.fails else 200, {"success": not self.fails})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in {"info": {}, "asked": [], "fails": False}.items():
        monkeypatch.setattr(Handler, name, value)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_an_update_did_not_clear_is_cleared_as_a_version_is_named(url: str) -> None:
    server = SglangServer(url)
    server.update(1, "me")
    server.name(1, "me")
    Handler.fails = True
    with pytest.raises(EngineFailed):
        server.update(2, "me")
    Handler.fails = False
    server.name(2, "me")
    server.name(2, "me")
    cleared = [True, False, True, True, False]
    assert Handler.asked == [("/update_weights_from_ipc", clears) for clears in cleared]


def test_what_an_earlier_trainer_did_not_clear_is_cleared_as_a_version_is_named(url: str) -> None:
    server = SglangServer(url)
    to = TrainerInfo(
        addresses=(Address(link="shared_memory"),),
        engine="engine",
        tensors=(),
        max_staged_bytes=1,
        timeout_s=1,
    )
    server.connect(to.model_dump())
    server.name(1, "me")
    assert [clears for _, clears in Handler.asked] == [False, True]


def test_caches_are_kept_for_who_wants_that(url: str) -> None:
    server = SglangServer(url, caches="keep")
    server.update(1, "me")
    server.name(1, "me")
    assert Handler.asked == [("/update_weights_from_ipc", False)] * 2


def test_an_error_that_names_process_1404_is_no_missing_route() -> None:
    with served(Engine(model(1))) as engine:

        def fail(call: str) -> None:
            if call == "write":
                raise RuntimeError("of process 1404 on host")

        engine.before = fail
        with pytest.raises(EngineFailed, match="process 1404 on host"):
            engine.client().update(1, "me")


@pytest.mark.parametrize("caches", ["version", "kept", True])
def test_caches_that_sglang_cannot_treat_so_are_refused(caches: Any, url: str) -> None:
    """Not taken for those that are kept: prompts would go on with values of old weights."""
    with pytest.raises(ConfigError, match=r'caches is .* SGLang takes "clear" or "keep"'):
        SglangServer(url, caches=caches)


@pytest.mark.parametrize("store", ["hicache_storage_backend", "enable_lmcache", "enable_flexkv"])
def test_a_server_that_keeps_prefixes_where_no_update_clears_them_is_refused(
    store: str, url: str
) -> None:
    Handler.info = {store: "file" if "backend" in store else True}
    with pytest.raises(ConfigError, match=rf"\({store}\).* or say caches=.keep."):
        SglangServer(url)
    SglangServer(url, caches="keep")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pipeline_stages_are_not_paused_but_by_ending_requests(
    mode: Literal["retract", "in_place"], url: str
) -> None:
    """SGLang's loop for them goes on."""
    with SglangServer(url).paused(mode):
        pass
    Handler.info = {"pp_size": 3}
    server = SglangServer(url)
    assert server.workers == 6
    with pytest.raises(ConfigError, match=mode), server.paused(mode):
        pass
    with server.paused("abort"):
        pass


class Sleeper:
    """A server of one worker whose memory SGLang releases.

    Args:
        kept: Whether SGLang keeps what weights hold.
    """

    def __init__(self, kept: bool) -> None:
        self.model, self._kept = random_model({"a": (3,)}, 1), kept
        self.strides = torch.full((2,), 16)
        vars(self.model)["kernel"] = SimpleNamespace(strides=self.strides)
        self.worker = worker_of(self.model)
        self.connects = 0

    def connect(self, connection: dict[str, Any], /) -> None:
        self.connects += 1
        self.worker.check_awake()
        self.worker.disconnect()
        to, target = TrainerInfo.model_validate(connection), ModuleTarget(self.model)
        self.worker.connect(to, target, torch.device("cpu"), rank=0, world=1)

    def update(self, version: int, holder: str, /) -> None:
        self.worker.commit(version, holder)

    def name(self, version: int, holder: str, /) -> None: ...

    def disconnect(self, holder: str, /) -> None: ...

    def ask(self, name: str, tags: list[str] | None) -> None:
        """Of SGLang's manager of weights."""
        runner = SimpleNamespace(model=self.model)
        manager = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner),
            memory_saver_adapter=SimpleNamespace(enabled=True),
        )
        _AROUND[name](self.touch, manager, SimpleNamespace(tags=tags))

    def touch(self, *_: object) -> None:
        if not self._kept:
            self.model.get_parameter("a").data.fill_(7)
            self.strides.fill_(7)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "After a sleep without a copy of the weights, what no sync writes is there again.",
)
@pytest.mark.parametrize("tags", [None, ["weights"]])
@pytest.mark.parametrize("kept", [True, False])
def test_weights_that_sglang_keeps_take_the_next_delta_and_others_are_sent(
    kept: bool, tags: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(enable_weights_cpu_backup=kept)
    monkeypatch.setattr(
        sys.modules["sglang.srt.runtime_context"], "get_server_args", lambda: settings
    )
    source, server = random_model({"a": (3,)}, 0), Sleeper(kept)
    link = shared_memory.Sender(tmp_path / "socket")
    with EngineSync(ModuleSource(source), server, link) as sync:
        sync.send_weights()
        last = server.worker._last
        assert last is not None
        for _ in range(2):
            server.ask("release_memory_occupation", tags)
            with pytest.raises(ConfigError, match="sleep"):
                server.update(2, last.holder)
            server.ask("resume_memory_occupation", ["kv_cache"])
            with pytest.raises(ConfigError, match="sleep"):
                server.update(2, last.holder)
            server.ask("resume_memory_occupation", tags)
            source.get_parameter("a").data.mul_(2)
            stats = sync.send_weights()
            assert (stats.receivers, stats.full_synced) == (1, 0 if kept else 1)
            assert bits_equal(source, server.model)
            assert server.strides.tolist() == [16, 16]
        assert server.connects == (1 if kept else 3)
        server.worker.disconnect()


def test_reloading_is_refused(tmp_path: Path) -> None:
    source = ModuleSource(random_model({"a": (3,)}, 0))
    link = shared_memory.Sender(tmp_path / "socket")
    with (
        EngineSync(source, Worker(), link, without_routes="reload") as sync,
        pytest.raises(ConfigError, match=r"SGLang.* without_routes=\"reload\""),
    ):
        sync.connect()
