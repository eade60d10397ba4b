"""Fleets of engines in threads of one process, whose calls fail or hang where a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch

from deltasync import ModuleSource, ModuleTarget, SyncStats
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import DeltaSyncError, EngineTaken
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.trainer_info import TrainerInfo, Work
from deltasync.integrations.worker import Worker
from deltasync.transports import shared_memory
from deltasync.transports.base import SendTransport
from tests.worlds.links import Model, bits_equal, random_model
from tests.worlds.toy_engines import rank_of

SHAPES = {"a": (8, 4), "b": (33,)}
CPU = torch.device("cpu")
T = TypeVar("T")


def model(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Model:
    """bfloat16 weights, drawn from a seed."""
    made = random_model(shapes, seed)
    for weights in made.parameters():
        weights.data = weights.data.bfloat16()
    return made


class Server:
    """An engine of one worker.

    Attributes:
        calls: What it was asked, in order.
        fails: The call that does, once.
        hangs: The call that waits for `goes_on`, once.
        before: Called before each call, with its name.
    """

    world = 1

    def __init__(self, module: Model) -> None:
        self.module, self.calls = module, list[str]()
        self.fails, self.hangs, self.goes_on = "", "", Event()
        self.before: Callable[[str], object] = lambda call: None
        self.is_paused, self.version = False, 0
        self.declines: Exception | None = None
        self.start()

    def start(self) -> None:
        """Be started, or restarted: the process is another one, and generates."""
        self.workers, self.is_paused = [Worker() for _ in range(self.world)], False

    def die(self) -> None:
        """End every connection, as the process would."""
        for worker in self.workers:
            worker.disconnect()

    def connect(self, connection: dict[str, Any], /) -> None:
        self.at("connect")
        to = TrainerInfo.model_validate(connection)
        refused: list[Exception] = []
        for rank, worker in enumerate(self.workers):
            try:
                worker.admit(to)
                if self.declines is not None:
                    raise self.declines
                self.let_connect(worker, to, rank)
            except (DeltaSyncError, RuntimeError) as error:
                worker.decline(to, CPU, error)
                refused.append(error)
        if refused:
            raise RuntimeError("Call to collective_rpc method failed") from refused[0]

    def let_connect(self, worker: Worker, to: TrainerInfo, rank: int) -> None:
        worker.connect(to, ModuleTarget(self.module), CPU, rank=rank, world=self.world)

    def update(self, version: int, holder: str, /) -> None:
        self.at("update")
        assert self.is_paused
        self.commit(version, holder)
        self.at("updated")

    def commit(self, version: int, holder: str, work: Work = "write") -> None:
        with ThreadPoolExecutor(self.world) as calls:
            each = [calls.submit(one.commit, version, holder, work=work) for one in self.workers]
        for done in each:
            done.result()

    def name(self, version: int, holder: str, /) -> None:
        self.at("name")
        self.commit(version, holder, "name")
        self.version = version

    def disconnect(self, holder: str, /) -> None:
        self.at("disconnect")
        for worker in self.workers:
            worker.disconnect(holder)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.at("pause")
        self.is_paused = True
        yield
        self.at("resume")
        self.is_paused = False

    def at(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)
        if call == self.fails:
            self.fails = ""
            raise RuntimeError("planted")
        if call == self.hangs:
            self.hangs = ""
            self.goes_on.wait(100)

    def holds(self, source: Model) -> bool:
        return bits_equal(source, self.module)


class OneCall(Server):
    """An engine that pauses, writes, names and resumes in one call."""

    def reach(self, paused: Callable[[], object], /) -> int:
        return self.world

    def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> None:
        self.at("switch")
        was_paused, self.is_paused = self.is_paused, self.is_paused or work == "write"
        try:
            self.commit(version, holder, work)
        except EngineTaken:
            self.is_paused = was_paused
            raise
        self.at("switched")
        self.version, self.is_paused = version, False


class Split(Server):
    """An engine of two workers, each of which holds a part."""

    world = 2

    def __init__(self, module: Model) -> None:
        super().__init__(module)
        self.models = [rank_of(module, rank) for rank in range(2)]

    def let_connect(self, worker: Worker, to: TrainerInfo, rank: int) -> None:
        target = RoutedTarget(self.models[rank], to.checkpoint())
        worker.connect(to, target, CPU, rank=rank, world=2)

    def holds(self, source: Model) -> bool:
        return all(bits_equal(rank_of(source, n), here) for n, here in enumerate(self.models))


class Here:
    """A fleet, its source, and the servers that were added, by name."""

    def __init__(self, fleet: EngineFleet, source: Model, link: Any) -> None:
        self.fleet, self.source, self.link = fleet, source, link
        self.servers: dict[str, Server] = {}

    def add(self, server: Server, name: str) -> Server:
        self.fleet.add(server, workers=server.world, paused=server.paused, name=name)
        self.servers[name] = server
        return server

    def send(self, **options: Any) -> SyncStats:
        return self.fleet.send_weights(**options)

    def step(self) -> None:
        for weights in self.source.parameters():
            weights.data[0] *= -2

    def dirty(self) -> list[str]:
        """Servers whose weights may mix two versions, as their workers know."""
        return [
            name
            for name, server in self.servers.items()
            for worker in server.workers
            if worker._receiver is not None and worker._receiver.is_dirty
        ]

    def catch_up(self) -> SyncStats:
        """Sync until no server is behind: calls that were interrupted end when they time out."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            self.step()
            stats = outcome(self.send)
            if isinstance(stats, SyncStats) and not stats.lost:
                return stats
            time.sleep(0.05)
        raise AssertionError(f"{stats}, {self.fleet.servers()}")

    def check(self, *names: str) -> None:
        """These servers, and no others, hold the source, and are not paused."""
        held = {name for name, server in self.servers.items() if server.holds(self.source)}
        assert held == set(names), (held, self.fleet.servers())
        for name in names:
            server = self.servers[name]
            assert server.version == self.fleet.sender.version, (name, server.calls)
            assert not server.is_paused, (name, server.calls)
            assert self.fleet.servers()[name].state == "current", self.fleet.servers()[name]


@contextmanager
def fleet_of(
    path: Path,
    count: int,
    *,
    kind: type[Server] = Server,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    is_same: bool = False,
    link: Callable[[Path], SendTransport] = shared_memory.Sender,
    **options: Any,
) -> Iterator[Here]:
    """A fleet of `count` servers named 0, 1 ...; those of `is_same` begin with the source."""
    options.setdefault("timeout_s", 10.0)
    source = model(0, shapes)
    transport = link(path / "socket")
    with ExitStack() as stack:
        fleet = EngineFleet(ModuleSource(source), transport, **options)
        here = Here(stack.enter_context(fleet), source, transport)
        for number in range(count):
            here.add(kind(model(0 if is_same else number + 1, shapes)), str(number))
        try:
            yield here
        finally:
            for server in here.servers.values():
                server.goes_on.set()
                server.die()


def outcome(call: Callable[[], T]) -> T | DeltaSyncError:
    try:
        return call()
    except DeltaSyncError as error:
        return error
