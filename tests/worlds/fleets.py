"""Engines in threads of one process, alone or in a fleet, whose calls fail or hang where a test
says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, SyncStats, WeightSource
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import DeltaSyncError, EngineTaken, TransportError, TransportTimeout
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.fleet import EngineFleet
from deltasync.integrations.trainer_info import TrainerInfo, Work
from deltasync.integrations.worker import Worker
from deltasync.transports import shared_memory
from deltasync.transports.base import Frame, SendTransport
from deltasync.wire.frame import decode
from tests.worlds.links import AMPLE_S, Model, bits_equal, random_model, until
from tests.worlds.toy_engines import rank_of

SHAPES = {"a": (8, 4), "b": (33,)}
CPU = torch.device("cpu")
CALLS = ["pause", "update", "name", "resume"]
"""Of an update."""
T = TypeVar("T")


def model(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Model:
    """bfloat16 weights, drawn from a seed."""
    return random_model(shapes, seed).bfloat16()


class Server:
    """An engine of one worker.

    Attributes:
        calls: What it was asked, in order.
        fails: The call that does, once. After "updated", say, only the answer is lost.
        hangs: The call that waits for `goes_on`, once.
        before: Called before each call, with its name, and when it was done.
        declines: Why its workers do not take part.
        device: Of its weights.
    """

    world, device = 1, CPU

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
                worker.check_awake()
                worker.admit(to)
                if self.declines is not None:
                    raise self.declines
                self.let_connect(worker, to, rank)
            except (DeltaSyncError, RuntimeError, OSError) as error:
                worker.decline(to, self.device, error)
                refused.append(error)
        if refused:
            raise RuntimeError("Call to collective_rpc method failed") from refused[0]
        self.befall("connected")

    def let_connect(self, worker: Worker, to: TrainerInfo, rank: int) -> None:
        worker.connect(to, ModuleTarget(self.module), self.device, rank=rank, world=self.world)

    def update(self, version: int, holder: str, /) -> None:
        self.at("update")
        assert self.is_paused
        self.commit(version, holder)
        self.befall("updated")

    def commit(self, version: int, holder: str, work: Work = "write") -> None:
        with ThreadPoolExecutor(self.world) as calls:
            each = [calls.submit(one.commit, version, holder, work=work) for one in self.workers]
        for done in each:
            done.result()

    def name(self, version: int, holder: str, /) -> None:
        self.at("name")
        self.commit(version, holder, "name")
        self.version = version
        self.befall("named")

    def disconnect(self, holder: str, /) -> None:
        self.at("disconnect")
        for worker in self.workers:
            worker.disconnect(holder)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.at("pause")
        self.is_paused = True
        self.befall("paused")
        yield
        self.at("resume")
        self.is_paused = False
        self.befall("resumed")

    def at(self, call: str) -> None:
        self.calls.append(call)
        self.befall(call)

    def befall(self, call: str) -> None:
        self.before(call)
        if call == self.fails:
            self.fails = ""
            raise RuntimeError("planted")
        if call == self.hangs:
            self.hangs = ""
            self.goes_on.wait(2 * AMPLE_S)

    def holds(self, source: Model) -> bool:
        return bits_equal(source, self.module)


class OneCall(Server):
    """An engine that pauses, writes, names and resumes in one call.

    Attributes:
        works: What these calls did.
    """

    def __init__(self, module: Model) -> None:
        super().__init__(module)
        self.works: list[Work] = []

    def reach(self, paused: Callable[[], object], /) -> int:
        return self.world

    def switch(self, version: int, work: Work, stays_paused: bool, holder: str, /) -> None:
        self.works.append(work)
        self.at("switch")
        was_paused, self.is_paused = self.is_paused, self.is_paused or work == "write"
        try:
            self.commit(version, holder, work)
        except EngineTaken:
            self.is_paused = was_paused
            raise
        self.befall("switched")
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


class Routed(Server):
    """An engine that keeps what its loader makes of a checkpoint, and is written by routes.

    Args:
        engine: Loads its weights by `load_weights`.
        started_on: The checkpoint that it was started on.
        proof: Makes what updates are proved with; None for a second instance of its class.
    """

    def __init__(
        self,
        engine: nn.Module,
        started_on: Mapping[str, Tensor],
        proof: Callable[[], Proof] | None = None,
    ) -> None:
        super().__init__(Model({}))
        self.engine: Any = engine
        self.started_on = started_on
        self.proof = proof or (lambda: Proof(engine, Startup(type(engine))))

    @property
    def worker(self) -> Worker:
        return self.workers[0]

    def let_connect(self, worker: Worker, to: TrainerInfo, rank: int) -> None:
        started_on = self.started_on.items
        worker.connect(
            to, worker.routed(self.engine, to, started_on, self.proof), CPU, rank=0, world=1
        )


class Watched(shared_memory.Sender):
    """A link that does something before each message, and before each wait for answers.

    Attributes:
        before: Is given the kind of the message, "buffer", "replies" or "some replies".
        late: Waits in which somebody was.
    """

    before: Callable[[str], object] = staticmethod(lambda kind: None)
    late: tuple[str, ...] = ()

    @contextmanager
    def _at(self, kind: str) -> Iterator[None]:
        self.before(kind)
        try:
            yield
        except TransportTimeout:
            self.late += (kind,)
            raise

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        with self._at(decode(frame.header)[0].kind):
            super().send(frame, timeout_s=timeout_s)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        self.before(decode(header)[0].kind)
        super().tell(peers, header, timeout_s=timeout_s)

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        with self._at("buffer"):
            return super().buffer(num_bytes, timeout_s=timeout_s)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        with self._at("replies"):
            replies = super().collect_replies(timeout_s=timeout_s)
        if any(isinstance(reply, TransportTimeout) for reply in replies.values()):
            self.late += ("replies",)
        return replies

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        with self._at("some replies"):
            replies = super().some_replies(peers, timeout_s=timeout_s)
        if timeout_s and not replies:
            self.late += ("some replies",)
        return replies


def at(number: int, kind: str, call: Callable[[], object]) -> Callable[[str], object]:
    """Do something once, at the n-th message of a kind, or the n-th call of a name."""
    seen = [0]

    def before(now: str) -> None:
        seen[0] += now == kind
        if now == kind and seen[0] == number:
            call()

    return before


def interrupt() -> None:
    raise KeyboardInterrupt


def refuse(call: str) -> None:
    raise ConnectionError("refused")


class Here:
    """A trainer, its source, and the servers that were added, by name."""

    def __init__(self, sync: EngineFleet, source: Any, link: Any) -> None:
        self.sync = self.fleet = sync
        self.source, self.link = source, link
        self.servers: dict[str, Server] = {}

    @property
    def holder(self) -> str:
        """As the worker of the first server knows the trainer."""
        last = next(iter(self.servers.values())).workers[0]._last
        assert last is not None
        return last.holder

    def add(self, server: Server, name: str, **options: Any) -> Server:
        options = {"paused": server.paused, "workers": server.world, **options}
        self.fleet.add(server, name=name, **options)
        self.servers[name] = server
        return server

    def send(self, **options: Any) -> SyncStats:
        return self.sync.send_weights(**options)

    def step(self) -> None:
        for weights in self.source.parameters():
            weights.data[0] *= -2

    def train(self, **options: Any) -> SyncStats:
        """Step, and send."""
        self.step()
        return self.send(**options)

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
            stats = outcome(self.train)
            if isinstance(stats, SyncStats) and not stats.lost:
                return stats
            time.sleep(0.05)
        raise AssertionError(f"{stats}, {self.states()}")

    def states(self) -> object:
        return self.sync.servers()

    def follow(self, *names: str) -> None:
        """These servers hold the source, and generate."""
        for name in names:
            assert self.servers[name].holds(self.source), self.states()
            assert not self.servers[name].is_paused, (name, self.servers[name].calls)
            if name in (states := self.fleet.servers()):
                assert states[name].state == "current", states

    def check(self, *names: str) -> None:
        """These servers, and no others, hold the source by its version, and generate."""
        names = names or tuple(self.servers)
        held = {name for name, server in self.servers.items() if server.holds(self.source)}
        assert held == set(names), (held, self.states())
        self.follow(*names)
        for name in names:
            server = self.servers[name]
            assert server.version == self.sync.sender.version, (name, server.calls)


@contextmanager
def _until_closed(here: Here) -> Iterator[Here]:
    with here.sync:
        try:
            yield here
        finally:
            for server in here.servers.values():
                server.goes_on.set()
                server.die()


def fleet_of(
    path: Path,
    count: int,
    *,
    kind: type[Server] = Server,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    link: Callable[[Path], SendTransport] = shared_memory.Sender,
    **options: Any,
) -> AbstractContextManager[Here]:
    """A fleet of `count` servers named 0, 1 ..., of other weights than the source."""
    path.mkdir(exist_ok=True)
    source, transport = model(0, shapes), link(path / "socket")
    fleet = EngineFleet(ModuleSource(source), transport, **{"timeout_s": AMPLE_S, **options})
    here = Here(fleet, source, transport)
    for number in range(count):
        here.add(kind(model(number + 1, shapes)), str(number))
    return _until_closed(here)


def engine_of(
    path: Path,
    *,
    kind: type[Server] = Server,
    server: Server | None = None,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    source: nn.Module | None = None,
    of: Callable[[nn.Module], WeightSource] = ModuleSource,
    through: Callable[[Any], Any] = lambda server: server,
    is_same: bool = False,
    link: Callable[[Path], SendTransport] = shared_memory.Sender,
    **options: Any,
) -> AbstractContextManager[Here]:
    """An `EngineSync` of one server, which is named 0.

    Args:
        server: By default one of this `kind`, of other weights than the source, or of the same.
        of: Makes the source that is sent of its module.
        through: Makes the client that reaches the server.
    """
    path.mkdir(exist_ok=True)
    server = server or kind(model(0 if is_same else 1, shapes))
    source, transport, client = source or model(0, shapes), link(path / "socket"), through(server)
    options = {"timeout_s": AMPLE_S, "workers": server.world, **options}
    options.setdefault("paused", getattr(client, "paused", nullcontext))
    here = Here(EngineSync(of(source), client, transport, **options), source, transport)
    here.servers["0"] = server
    return _until_closed(here)


def outcome(call: Callable[[], T]) -> T | DeltaSyncError:
    try:
        return call()
    except DeltaSyncError as error:
        return error


@contextmanager
def in_thread(call: Callable[[], T], *, timeout_s: float = AMPLE_S) -> Iterator[list[T]]:
    """Call in a thread that ends in this context. What it returned is in the list then."""
    found: list[T] = []
    thread = Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    yield found
    thread.join(timeout_s)
    assert not thread.is_alive()


def hung(server: Server) -> None:
    """Wait until a server has begun the call in which it hangs."""
    until(lambda: not server.hangs)
