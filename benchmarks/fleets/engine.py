"""An engine of toy weights in a process of its own, and the `Server` that reaches it over HTTP.

It generates in a thread, which looks at the weights in each step and writes down what it sees.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.actors import Diary
from benchmarks.chaos.weights import Model, Truth, fingerprint
from deltasync import ModuleTarget
from deltasync.integrations.http import Http
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker

_STEP_S = 0.005


@dataclass(frozen=True, slots=True)
class Life:
    """What a process is told.

    Attributes:
        name, number: Of the engine, and which of its processes this is.
        port: Where it listens.
        seed: Of the checkpoint that it starts on: version 1 of the trainer.
        device: Where it has its weights.
        events: Where it writes.
    """

    name: str
    number: int
    port: int
    seed: int
    device: str
    events: Path


class Engine:
    """Weights, whether generation is paused, and a thread that generates."""

    def __init__(self, life: Life) -> None:
        self.diary = Diary(life.events, engine=life.name, life=life.number)
        self._device = torch.device(life.device)
        self.model, self.worker = Model().to(self._device), Worker()
        truth = Truth(life.seed)
        truth.go(1)
        truth.write(self.model)
        self._steps = threading.Lock()  # held during a step, and while `_paused_at_s` changes
        self._paused_at_s = 0.0
        self._seen = ""
        threading.Thread(target=self._generate, daemon=True).start()

    def note(self, event: str, **facts: Any) -> None:
        self.diary.note(event, at_s=time.monotonic(), **facts)

    def ask(self, call: str, body: Any) -> object:
        """What a call of the trainer does."""
        match call:
            case "connect":
                to, target = TrainerInfo.model_validate(body), ModuleTarget(self.model)
                self.worker.connect(to, target, self._device, rank=0, world=1)
            case "update":
                assert self._paused_at_s, "it generates"
                self.worker.commit(**body)
            case "name":
                self.worker.commit(**body, work="name")
                self.note("named", version=body["version"], print=fingerprint(self.model))
            case "disconnect":
                self.worker.disconnect(body)
            case "pause":
                with self._steps:
                    self._paused_at_s = self._paused_at_s or time.monotonic()
            case "resume":
                self._resume()
            case "state":
                return {"paused": bool(self._paused_at_s), "print": fingerprint(self.model)}
            case _:
                raise ValueError(call)
        return None

    def _resume(self) -> None:
        with self._steps:
            began_s, self._paused_at_s = self._paused_at_s, 0.0
        if began_s:
            self.note("paused", seconds=time.monotonic() - began_s)

    def _generate(self) -> None:
        while not self.diary.is_orphan:
            with self._steps:
                if not self._paused_at_s and (seen := fingerprint(self.model)) != self._seen:
                    self._seen = seen
                    self.note("serves", print=seen)
            time.sleep(_STEP_S)
        os._exit(0)  # nobody is left to whom this matters


def live(life: Life) -> None:
    """Be an engine's process, until it is killed."""
    torch.set_num_threads(1)
    engine = Engine(life)

    class Handler(BaseHTTPRequestHandler):
        timeout = 60

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, said = 200, json.dumps(engine.ask(self.path[1:], body))
            except Exception as error:  # noqa: BLE001 - the trainer is told, as servers do
                status, said = 500, f"{type(error).__name__}: {error}"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: Any) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_port = True

        def server_bind(self) -> None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            super().server_bind()

    with Listening(("127.0.0.1", life.port), Handler) as server:
        engine.note("begun")
        server.serve_forever()


class HttpServer:
    """Reaches an engine's process, as a `Server`."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._http = Http(self.url, timeout_s=timeout_s)

    def connect(self, trainer: dict[str, Any], /) -> None:
        self._http.post("connect", trainer)

    def update(self, version: int, holder: str, /) -> None:
        self._http.post("update", {"version": version, "holder": holder})

    def name(self, version: int, holder: str, /) -> None:
        self._http.post("name", {"version": version, "holder": holder})

    def disconnect(self, holder: str, /) -> None:
        self._http.post("disconnect", holder)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.post("state", 0)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._http.post("pause", 0)
        try:
            yield
        finally:
            self._http.post("resume", 0)


def reserve() -> socket.socket:
    """A port that engines' processes listen on, one after the other, and nobody else does."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held
