"""An engine in a process of its own, which is asked through a socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

from deltasync.errors import PeerLost, TransportTimeout
from deltasync.testing.processes import Child
from tests.worlds.fleets import CPU, Server
from tests.worlds.links import Model, random_model, until


def bits(module: nn.Module) -> list[bytes]:
    return [p.data.cpu().view(torch.uint8).numpy().tobytes() for p in module.parameters()]


class Engine(Server):
    """What can be asked of a server in its process."""

    def pauses(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def number(self) -> int:
        return os.getpid()

    def spoil(self) -> None:
        self.die()
        self.module.get_parameter("a").data.add_(1)

    def state(self) -> tuple[list[bytes], int, bool]:
        return bits(self.module), self.version, self.is_paused


def serve(path: str, shapes: dict[str, tuple[int, ...]], seed: int, device: str = "cpu") -> None:
    """An engine's process: answers one call on each connection."""
    made: Model = random_model(shapes, seed).to(device)
    server = Engine(made)
    server.device = torch.device(device) if device != "cpu" else CPU
    server.is_paused = True  # nobody pauses it in some tests
    with Listener(path, "AF_UNIX", backlog=64) as listener:
        while True:
            Thread(target=_answer, args=(server, listener.accept()), daemon=True).start()


def _answer(server: Engine, line: Connection) -> None:
    with line:
        call, *arguments = line.recv()
        try:
            line.send(getattr(server, call)(*arguments))
        except Exception as error:  # noqa: BLE001 - the trainer is told, as servers do
            line.send(RuntimeError(f"{type(error).__name__}: {error}"))


class Remote:
    """The `Server` of an engine's process.

    Args:
        timeout_s: For each call.
    """

    def __init__(self, path: Path, timeout_s: float = 60.0) -> None:
        self._path, self._timeout_s = str(path), timeout_s
        self.child: Child | None = None

    def started(self, shapes: dict[str, tuple[int, ...]], seed: int) -> Remote:
        """It runs, in a process of this one."""
        self.child = Child(serve, self._path, shapes, seed)
        return self.reached()

    def reached(self) -> Remote:
        """It listens: its socket is there a moment before."""
        until(self._listens, timeout_s=60.0)
        return self

    def _listens(self) -> bool:
        with suppress(PeerLost):
            return bool(self.ask("number"))
        return False

    def stop(self) -> None:
        """Return when it does nothing any more: that takes a moment."""
        stat = Path(f"/proc/{self.ask('number')}/stat")
        assert self.child is not None
        self.child.pause()
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def ask(self, call: str, *arguments: object) -> Any:
        try:
            with Client(self._path, "AF_UNIX") as line:
                line.send((call, *arguments))
                if not line.poll(self._timeout_s):
                    raise TransportTimeout(f"{call} was not answered")
                answered = line.recv()
        except (OSError, EOFError) as error:
            if isinstance(error, TransportTimeout):
                raise
            raise PeerLost(f"{call}: {error}") from error
        if isinstance(answered, Exception):
            raise answered
        return answered

    def connect(self, trainer: dict[str, Any], /) -> None:
        self.ask("connect", trainer)

    def update(self, version: int, holder: str, /) -> None:
        self.ask("update", version, holder)

    def name(self, version: int, holder: str, /) -> None:
        self.ask("name", version, holder)

    def disconnect(self, holder: str, /) -> None:
        self.ask("disconnect", holder)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.ask("pauses", True)
        yield
        self.ask("pauses", False)
