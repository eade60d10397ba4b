"""An engine behind HTTP, with the routes of SGLang, whose answers are lost where a test says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deltasync import ModuleTarget
from deltasync.errors import DeltaSyncError
from deltasync.integrations.sglang import REQUEST, SglangServer
from deltasync.integrations.trainer_info import WorkerRequest
from deltasync.integrations.worker import Worker
from tests.worlds.fleets import CPU
from tests.worlds.links import Model

LOST = ["error", "cut", "garbage", "silence"]
"""How the answer to a call that was done gets lost."""


class Engine:
    """An engine of one worker.

    Attributes:
        calls: What it was asked, in order.
        ended: What of that was done, or refused.
        before: Called before each call, with its name.
        loses: How answers get lost, by call.
        fails: Calls that are not done.
        goes_on: Ends silences.
    """

    def __init__(self, module: Model) -> None:
        self.module, self.worker = module, Worker()
        self.is_paused, self.version = False, ""
        self.calls: list[str] = []
        self.ended: list[str] = []
        self.before: Callable[[str], object] = lambda call: None
        self.loses: dict[str, str] = {}
        self.fails: set[str] = set()
        self.goes_on = threading.Event()
        self._turn = threading.Lock()  # a worker does one thing at a time
        self.url = ""

    def client(self, timeout_s: float = 20.0) -> SglangServer:
        return SglangServer(self.url, timeout_s=timeout_s)

    def do(self, call: str, body: Any) -> dict[str, object]:
        self.before(call)
        if call in self.fails:
            raise RuntimeError("planted")
        match call:
            case "server_info":
                return {"dp_size": 1, "tp_size": 1, "pp_size": 1}
            case "pause_generation" | "continue_generation":
                self.is_paused = call == "pause_generation"
            case "connect" | "write" | "name" | "disconnect":
                request = WorkerRequest.model_validate_json(body["zmq_handles"][REQUEST])
                with self._turn:
                    self._carry_out(request)
                    self.version = body["weight_version"] or self.version
        return {"success": True}

    def _carry_out(self, request: WorkerRequest) -> None:
        if request.version is not None:
            self.worker.commit(request.version, request.holder, work=request.work)
        elif request.trainer is None:
            self.worker.disconnect(request.holder)
        else:
            try:
                target = ModuleTarget(self.module)
                self.worker.connect(request.trainer, target, CPU, rank=0, world=1)
            except DeltaSyncError as error:
                self.worker.decline(request.trainer, CPU, error)
                raise


def call_of(path: str, body: Any) -> str:
    if path != "/update_weights_from_ipc":
        return path.strip("/").partition("?")[0]
    request = WorkerRequest.model_validate_json(body["zmq_handles"][REQUEST])
    if request.trainer is not None:
        return "connect"
    return "disconnect" if request.version is None else request.work


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        call = call_of(self.path, body)
        self.engine.calls.append(call)
        status, said = 200, b""
        try:
            said = json.dumps(self.engine.do(call, body)).encode()
        except Exception as error:  # noqa: BLE001 - which the trainer is told
            status, said = 400, f"{type(error).__name__}: {error}".encode()
        self.engine.ended.append(call)
        lost = self.engine.loses.get(call, "")
        if lost == "silence":
            self.engine.goes_on.wait(60)
        if lost in ("silence", "cut"):
            self.close_connection = True
            return
        if lost == "error":
            status = 500
        self.send_response(status)
        if lost == "garbage":
            said = b"<html>"
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST  # noqa: N815 - so `http.server` calls it

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(engine: Engine) -> Iterator[Engine]:
    """The engine, as long as its server runs."""
    handler = type("Handler", (Handler,), {"engine": engine})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        engine.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield engine
        finally:
            engine.goes_on.set()
            engine.worker.disconnect()
            http.shutdown()
            thread.join()
