"""Engines in processes of their own, several of which stop at once: that costs one timeout."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import ModuleSource, SenderOptions, SyncStats
from deltasync.errors import PeerLost, TransportError, TransportTimeout
from deltasync.integrations.fleet import EngineFleet, Pauses
from deltasync.testing.processes import Child
from deltasync.transports import shared_memory
from deltasync.transports.base import Frame
from deltasync.wire.frame import decode
from tests.worlds.fleets import Server, model, outcome
from tests.worlds.links import Model, until

SHAPES = {"a": (64, 1024), "b": (33,)}
TIMEOUT_S = 3.0
BUCKETS = SenderOptions(bucket_bytes=1 << 14)


def serve(path: str, seed: int) -> None:
    """An engine's process: answers one call on each connection."""
    server = Server(model(seed, SHAPES))
    with Listener(path, "AF_UNIX", backlog=64) as listener:
        while True:
            Thread(target=answer, args=(server, listener.accept()), daemon=True).start()


def answer(server: Server, line: Connection) -> None:
    with line:
        call, *arguments = line.recv()
        try:
            line.send(getattr(Engine, call)(server, *arguments))
        except Exception as error:  # noqa: BLE001 - the trainer is told, as servers do
            line.send(RuntimeError(f"{type(error).__name__}: {error}"))


class Engine:
    """What an engine's process does with its server."""

    connect, update, name, disconnect = (
        Server.connect,
        Server.update,
        Server.name,
        Server.disconnect,
    )

    @staticmethod
    def pause(server: Server) -> None:
        server.is_paused = True

    @staticmethod
    def resume(server: Server) -> None:
        server.is_paused = False

    @staticmethod
    def number(server: Server) -> int:
        return os.getpid()

    @staticmethod
    def spoil(server: Server) -> None:
        server.die()
        server.module.get_parameter("a").data.add_(1)

    @staticmethod
    def state(server: Server) -> tuple[list[bytes], int, bool]:
        return bits(server.module), server.version, server.is_paused


def bits(module: Model) -> list[bytes]:
    return [weights.data.view(torch.uint8).numpy().tobytes() for weights in module.parameters()]


class Remote:
    """The `Server` of an engine's process."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = str(path)
        self.child = Child(serve, self._path, seed)
        until(path.exists, timeout_s=60.0)

    def stop(self) -> None:
        """Return when it does nothing any more: that takes a moment."""
        stat = Path(f"/proc/{self.ask('number')}/stat")
        self.child.pause()
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def ask(self, call: str, *arguments: object) -> Any:
        try:
            with Client(self._path, "AF_UNIX") as line:
                line.send((call, *arguments))
                if not line.poll(2 * TIMEOUT_S):
                    raise TransportTimeout(f"{call} was not answered")
                answered = line.recv()
        except (OSError, EOFError) as error:
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
        self.ask("pause")
        yield
        self.ask("resume")


class Counted(shared_memory.Sender):
    """A link that does something at a moment, and notes the waits in which somebody was late."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.before: Callable[[str], object] = lambda kind: None
        self.late: list[str] = []

    @contextmanager
    def noting(self, kind: str) -> Iterator[None]:
        self.before(kind)
        try:
            yield
        except TransportTimeout:
            self.late.append(kind)
            raise

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        with self.noting("buffer"):
            return super().buffer(num_bytes, timeout_s=timeout_s)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        with self.noting(decode(frame.header)[0].kind):
            super().send(frame, timeout_s=timeout_s)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        with self.noting("replies"):
            replies = super().collect_replies(timeout_s=timeout_s)
        self.late += (
            ["replies"] if any(isinstance(r, TransportTimeout) for r in replies.values()) else []
        )
        return replies

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        with self.noting("some replies"):
            replies = super().some_replies(peers, timeout_s=timeout_s)
        self.late += [] if replies or not timeout_s else ["some replies"]
        return replies


@dataclass
class Fleet:
    """A fleet of engines' processes, its source, and its link."""

    fleet: EngineFleet
    source: Model
    link: Counted
    path: Path
    servers: dict[str, Remote] = field(default_factory=dict)

    def add(self, name: str, seed: int) -> None:
        server = self.servers[name] = Remote(self.path / name, seed)
        self.fleet.add(server, paused=server.paused, name=name)

    def at(self, kind: str, number: int, stopped: Collection[str]) -> None:
        """Stop engines at the n-th message of a kind, in the next call."""
        seen = [0]
        self.link.late.clear()

        def before(now: str) -> None:
            seen[0] += now == kind
            if now == kind and seen[0] == number:
                for name in stopped:
                    self.servers[name].stop()

        self.link.before = before

    def holds(self, name: str) -> bool:
        held, version, is_paused = self.servers[name].ask("state")
        return held == bits(self.source) and version == self.fleet.sender.version and not is_paused

    def catch_up(self) -> None:
        """Let all engines go on, and sync until none is behind."""
        self.link.before = lambda kind: None
        for server in self.servers.values():
            server.child.resume()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            stats = outcome(self.fleet.send_weights)
            if isinstance(stats, SyncStats) and not stats.lost:
                return
        raise AssertionError(f"{stats}, {self.fleet.servers()}")


@contextmanager
def fleet_of(path: Path, count: int, **options: Any) -> Iterator[Fleet]:
    """Servers are named 0, 1 ..."""
    source, link = model(0, SHAPES), Counted(path / "socket")
    made = EngineFleet(ModuleSource(source), link, timeout_s=TIMEOUT_S, **options)
    with ExitStack() as stack:
        fleet = Fleet(stack.enter_context(made), source, link, path)
        for number in range(count):
            fleet.add(str(number), number + 1)
            stack.callback(fleet.servers[str(number)].child.kill)
        yield fleet


def check_stopped_at(here: Fleet, kind: str, number: int, sound: str) -> list[str]:
    """All engines but one stop: that one holds the version. Returns the waits that it cost."""
    here.source.get_parameter("a").data.mul_(-2)
    stopped = set(here.servers) - {sound}
    here.at(kind, number, stopped)
    stats = here.fleet.send_weights()
    late = list(here.link.late)
    assert stats.num_buckets > 4
    assert (stats.receivers, set(stats.lost)) == (1, stopped), kind
    assert here.holds(sound)
    here.catch_up()
    assert all(map(here.holds, here.servers)), kind
    return late


@pytest.mark.promise(
    "Time",
    "Servers that stop at the same time cost one timeout a phase, whatever their number; in a "
    "rolling fleet two.",
)
def test_engines_that_stop_at_once_cost_one_timeout(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 4, options=BUCKETS) as here:
        assert here.fleet.send_weights().receivers == 4
        for kind, number in (("begin", 1), ("bucket", 1), ("bucket", 4), ("prepare", 1)):
            assert len(check_stopped_at(here, kind, number, "3")) == 1, kind
        assert check_stopped_at(here, "commit", 1, "0") == ["some replies"]


@pytest.mark.promise(
    "Time",
    "Servers that stop at the same time cost one timeout a phase, whatever their number; in a "
    "rolling fleet two.",
)
def test_in_a_rolling_fleet_they_cost_one_alone_and_one_together(tmp_path: Path) -> None:
    with fleet_of(tmp_path, 4, pauses="rolling", options=BUCKETS) as here:
        here.fleet.send_weights()
        for sound in ("0", "3"):  # its turn comes first, and last
            assert check_stopped_at(here, "commit", 1, sound) == 2 * ["some replies"]


def test_engines_that_stop_in_turn_before_the_first_wait_cost_two_at_most(tmp_path: Path) -> None:
    """Who has let go of all payloads by then is found out in the second wait."""
    with fleet_of(tmp_path, 4, options=BUCKETS) as here:
        here.fleet.send_weights()
        here.source.get_parameter("a").data.mul_(-2)
        seen, moments = Counter[str](), {("bucket", 1): "1", ("bucket", 2): "2", ("buffer", 3): "3"}

        def before(kind: str) -> None:
            seen[kind] += 1
            if name := moments.pop((kind, seen[kind]), ""):
                here.servers[name].stop()

        here.link.before = before
        stats = here.fleet.send_weights()
        assert (stats.receivers, set(stats.lost)) == (1, {"1", "2", "3"})
        assert len(here.link.late) <= 2, here.link.late
        assert here.holds("0")
        here.catch_up()
        assert all(map(here.holds, here.servers))


@pytest.mark.promise(
    "Time",
    "Servers that stop at the same time cost one timeout a phase, whatever their number; in a "
    "rolling fleet two.",
)
@pytest.mark.parametrize("pauses", ["together", "rolling"])
def test_an_engine_joins_although_others_stop_as_they_join(pauses: Pauses, tmp_path: Path) -> None:
    with fleet_of(tmp_path, 4, pauses=pauses, options=BUCKETS) as here:
        here.fleet.send_weights()
        for moment in (("bucket", 2), ("prepare", 2)):  # the first is of the delta
            for name in ("1", "2", "3"):
                here.fleet.remove(name)
                here.servers[name].ask("spoil")
                here.fleet.add(here.servers[name], paused=here.servers[name].paused, name=name)
            here.at(*moment, ["1", "2"])
            stats = here.fleet.send_weights()  # nothing has changed: what is sent are full syncs
            assert set(stats.lost) == {"1", "2"}, stats.lost
            assert here.holds("0")
            assert here.holds("3")
            # In turns, the first that is late is waited for alone, and all others together.
            assert len(here.link.late) == (2 if pauses == "rolling" else 1), here.link.late
            here.catch_up()
            assert all(map(here.holds, here.servers))
