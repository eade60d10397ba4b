"""What a worker does once others have loaded its engine, and what the trainer makes of answers."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.errors import DeltaSyncError, EngineFailed, SyncAborted
from deltasync.integrations.checkpoint_engine import NOT_YET
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.sglang import SglangServer
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.transports import shared_memory
from tests.worlds.links import Model

CPU = torch.device("cpu")


class Engine(nn.Module):
    """Keeps two tensors of a checkpoint as one, upside down after loading if it shuffles."""

    def __init__(self, *, shuffles: bool = False) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.shuffles = shuffles

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            begin = {"a": 0, "b": 4}[name]
            self.both[begin : begin + 4].copy_(tensor)

    def bring(self, source: nn.Module) -> None:
        """As others load it."""
        self.load_weights([(name, tensor.data) for name, tensor in source.named_parameters()])
        if self.shuffles:
            self.both.copy_(self.both.flip(0))


class Server:
    """One worker, whose generation is paused or not."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.worker = engine, Worker()
        self.named: list[int] = []
        self.is_paused = self.refuses_names = self.breaks_off = False
        self.update_ends = threading.Event()
        self.update_ends.set()

    def connect(self, connection: dict[str, Any], /) -> None:
        self.worker.disconnect()
        to = TrainerInfo.model_validate(connection)
        try:
            target = self.worker.routed(self.engine, to, self.started_on, self._proof)
            self.worker.connect(to, target, CPU, rank=0, world=1)
        except Exception as error:
            self.worker.decline(to, CPU, error)
            raise

    def _proof(self) -> Proof:
        return Proof(self.engine, Startup(Engine))

    def started_on(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("a", torch.zeros(4, 4)), ("b", torch.zeros(4, 4)))

    def update(self, version: int, holder: str, /) -> None:
        try:
            if self.breaks_off:
                self.worker.disconnect()
            else:
                self.worker.commit(version, holder)
            self.update_ends.wait(30)
            if self.breaks_off:
                raise RuntimeError("planted")
        except Exception as error:
            raise EngineFailed(str(error)) from error

    def name(self, version: int, holder: str, /) -> None:
        if self.refuses_names:
            raise EngineFailed("planted")
        self.update(version, holder)
        self.named.append(version)

    def disconnect(self, holder: str, /) -> None:
        self.worker.disconnect(holder)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


def weights(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model({name: torch.randn(4, 4, generator=generator) for name in "ab"})


@contextmanager
def connected(
    source: Model, server: Server, folder: Path, *, timeout_s: float = 60.0
) -> Iterator[EngineSync]:
    link = shared_memory.Sender(folder / "socket")
    with EngineSync(
        ModuleSource(source), server, link, paused=server.paused, timeout_s=timeout_s
    ) as sync:
        yield sync
        server.worker.disconnect()


def test_what_others_have_loaded_is_proved_by_the_trainers_digest(tmp_path: Path) -> None:
    source, server = weights(0), Server(Engine())
    server.worker.reloaded()
    server.engine.bring(source)
    with connected(source, server, tmp_path) as sync:
        assert sync.send_weights().full_synced == 0
        source.get_parameter("b").data[2, 3] = 7
        assert sync.send_weights().kind == "delta"
        assert server.engine.both[6, 3] == 7
        server.worker.reloaded()
        server.engine.both.zero_()  # which may be now: it is known where they lie
        assert sync.send_weights().full_synced == 1
        assert torch.equal(server.engine.both[4:], source.get_parameter("b"))


@pytest.mark.parametrize("shuffles", [False, True], ids=["other weights", "another layout"])
def test_what_nothing_proves_is_not_written(shuffles: bool, tmp_path: Path) -> None:
    source, server = weights(0), Server(Engine(shuffles=shuffles))
    server.worker.reloaded()
    server.engine.bring(source if shuffles else weights(1))
    before = server.engine.both.clone()
    with connected(source, server, tmp_path) as sync:
        for _ in range(2):
            with pytest.raises(SyncAborted, match="others have loaded this engine"):
                sync.send_weights()
            assert torch.equal(server.engine.both, before)
            assert server.named == []


def test_generation_resumes_when_others_have_loaded_the_trainers_weights(tmp_path: Path) -> None:
    source, server = weights(0), Server(Engine())
    server.worker.reloaded()
    with connected(source, server, tmp_path) as sync:
        with pytest.raises(SyncAborted):
            sync.send_weights()
        server.worker.reloaded()
        server.engine.bring(source)
        assert sync.send_weights().full_synced == 0
        assert not server.is_paused
        assert server.named == [sync.sender.version]


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "An engine that may hold a mixture stays paused, and `close` logs it.",
)
def test_an_engine_that_may_hold_a_mixture_stays_paused_and_close_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, server = weights(0), Server(Engine())
    server.worker.reloaded()
    with connected(source, server, tmp_path) as sync:
        with pytest.raises(SyncAborted):
            sync.send_weights()
        sync.close()
        del sync
    gc.collect()
    assert server.is_paused
    (said,) = errors_in(caplog)
    assert "stays paused" in said.message


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Workers whose trainer is gone log warnings beside them."""
    return [record for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("is_held", [True, False], ids=["whole", "a mixture"])
def test_close_while_an_update_is_under_way_leaves_a_mixture_paused_and_nothing_else(
    is_held: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, server = weights(0), Server(Engine())
    server.update_ends.clear()
    with connected(source, server, tmp_path, timeout_s=2.0) as sync:
        server.breaks_off = not is_held
        with pytest.raises(DeltaSyncError):
            sync.send_weights()
        assert server.is_paused
        sync.close()
        assert not errors_in(caplog)
        server.update_ends.set()
        sync._engine._calls.shutdown(wait=True)
    assert server.is_paused is not is_held
    assert len(errors_in(caplog)) == (not is_held)


def test_generation_that_was_resumed_is_nothing_to_speak_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, server = weights(0), Server(Engine())
    with connected(source, server, tmp_path) as sync:
        sync.send_weights()
    assert not server.is_paused
    assert not errors_in(caplog)


def test_generation_resumes_though_the_version_of_right_weights_gets_no_name(
    tmp_path: Path,
) -> None:
    source, server = weights(0), Server(Engine())
    server.worker.reloaded()
    with connected(source, server, tmp_path) as sync:
        with pytest.raises(SyncAborted):
            sync.send_weights()
        assert server.is_paused
        server.worker.reloaded()
        server.engine.bring(source)
        server.refuses_names = True
        with pytest.raises(EngineFailed, match="planted"):
            sync.send_weights()
        assert not server.is_paused
        server.refuses_names = False
        sync.send_weights()
        assert server.named == [sync.sender.version]


class Handler(BaseHTTPRequestHandler):
    """A server of SGLang's that waits for its initial weights, and refuses version 9."""

    def do_GET(self) -> None:
        self.answer(200, {"tp_size": 2, "pp_size": 1, "dp_size": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        order = json.loads(body["zmq_handles"]["deltasync"])
        asked.append((self.path, order["version"], body["weight_version"]))
        match order["version"]:
            case None:
                self.answer(400, {"success": False, "message": NOT_YET})
            case 9:
                self.answer(400, {"success": False, "message": "planted"})
            case _:
                self.answer(200, {"success": True})

    def answer(self, status: int, said: object) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


asked: list[tuple[str, int | None, str | None]] = []


def test_orders_take_the_way_of_a_parameter_servers_sockets() -> None:
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        server = SglangServer(f"http://127.0.0.1:{http.server_port}")
        assert server.workers == 2
        server.disconnect("me")  # is done, though the answer is that no weights have come
        server.update(7, "me")
        server.name(7, "me")
        with pytest.raises(EngineFailed, match="planted"):
            server.update(9, "me")
        http.shutdown()
        thread.join()
    path = "/update_weights_from_ipc"
    assert asked == [(path, None, None), (path, 7, None), (path, 7, "7"), (path, 9, None)]
