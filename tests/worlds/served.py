"""Engines behind HTTP, with the routes of SGLang."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deltasync.integrations.sglang import REQUEST, SglangServer
from deltasync.integrations.trainer_info import WorkerRequest
from tests.worlds.fleets import Server
from tests.worlds.links import Model

ANSWER = {"success": True, "dp_size": 1, "tp_size": 1, "pp_size": 1}


class Served(Server):
    """An engine whose calls come by HTTP.

    Attributes:
        never: Calls that are not done.
    """

    def __init__(self, module: Model) -> None:
        super().__init__(module)
        self.never: set[str] = set()
        self.turn = threading.Lock()  # a worker does one thing at a time
        self.url = ""

    def client(self, **options: Any) -> SglangServer:
        return SglangServer(self.url, **{"timeout_s": 20.0, **options})

    def at(self, call: str) -> None:
        super().at(call)
        if call in self.never:
            raise RuntimeError("planted")

    def asked(self, path: str, body: Any) -> Callable[[], object]:
        """What is asked for, to be done."""
        match path.strip("/").partition("?")[0]:
            case "server_info":
                return lambda: None
            case "pause_generation":
                return lambda: self._pauses("pause", True)
            case "continue_generation":
                return lambda: self._pauses("resume", False)
        request = WorkerRequest.model_validate_json(body["zmq_handles"][REQUEST])
        if request.trainer is not None:
            trainer = request.trainer.model_dump(mode="json")
            return lambda: self.connect(trainer)
        version, holder = request.version, request.holder
        if version is None:
            return lambda: self.disconnect(holder)
        if request.work == "name":
            return lambda: self.name(version, holder)
        return lambda: self._write(version, holder)

    def _pauses(self, call: str, is_paused: bool) -> None:
        self.at(call)
        self.is_paused = is_paused

    def _write(self, version: int, holder: str) -> None:
        self.at("update")
        with self.turn:
            self.commit(version, holder)


class Handler(BaseHTTPRequestHandler):
    engine: Served

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        do = self.engine.asked(self.path, body)
        status, said = 200, json.dumps(ANSWER).encode()
        try:
            do()
        except Exception as error:  # noqa: BLE001 - which the trainer is told
            cause = error.__cause__ or error
            status, said = 400, f"{type(cause).__name__}: {cause}".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_POST  # noqa: N815 - so `http.server` calls it

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(engine: Served) -> Iterator[Served]:
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
            engine.die()
            http.shutdown()
            thread.join()
