"""Receivers in threads over the in-process transport, for tests of whole syncs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deltasync import (
    DeltaSyncError,
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    SyncStats,
    WeightReceiver,
    WeightSender,
    WeightSource,
    WeightTarget,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import TargetMoved, TransportClosed, TransportError, TransportTimeout
from deltasync.sync.protocol.round import Owner
from deltasync.sync.source.weights import LocalWeights
from deltasync.transports import collective, inprocess, shared_memory
from deltasync.transports.base import Frame, ReceiveTransport, SendTransport
from deltasync.wire.frame import decode

AMPLE_S = 60.0  # for what is expected to succeed, on a busy machine


class Model(nn.Module):
    """A bag of parameters: what a test needs, nothing that computes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def random_model(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Model:
    """Normally distributed float32 weights."""
    generator = torch.Generator().manual_seed(seed)
    return Model({n: torch.randn(shape, generator=generator) for n, shape in shapes.items()})


def step(source: nn.Module, generator: torch.Generator, share: float) -> None:
    """Draw a share of the weights anew."""
    for weights in source.parameters():
        mask = torch.rand(weights.shape, generator=generator) < share
        drawn = torch.randn(weights.shape, generator=generator).to(weights.dtype)
        weights.data[mask] = drawn[mask]


def bits_equal(left: nn.Module, right: nn.Module) -> bool:
    """Whether two models of the same dtypes hold the same bits."""
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    return ours.keys() == theirs.keys() and all(
        torch.equal(as_bits(ours[name]), as_bits(theirs[name])) for name in ours
    )


def until(condition: Callable[[], bool], *, timeout_s: float = AMPLE_S) -> None:
    """Wait for what another thread is to do, also on a busy machine."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FailsOnce:
    """A target that fails in the pause, after everything was done there, once it is told to."""

    fails = False

    def finish(self, changed: Collection[int] | None = None) -> None:
        super().finish(changed)  # type: ignore[misc]
        if self.fails:
            self.fails = False
            raise TargetMoved("planted")


class Stubborn(FailsOnce, ModuleTarget):
    """Weights of a module."""


class Serving:
    """A receiver that syncs in a thread until it is stopped, rejoining after errors."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self.receiver = receiver
        self.errors: list[DeltaSyncError] = []
        self.crash: BaseException | None = None
        self.versions: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Serving:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self.receiver.close()
        self._thread.join(AMPLE_S)
        assert not self._thread.is_alive(), "the receiver's thread hangs"
        if self.crash is not None:
            raise self.crash

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except BaseException as error:
            self.crash = error
            raise

    def _turn(self) -> None:
        try:
            self.versions.append(self.receiver.receive_weights(timeout_s=0.2))
        except TransportTimeout:
            return
        except TransportClosed:
            self._stop.set()
        except DeltaSyncError as error:
            self.errors.append(error.with_traceback(None))
            self._stop.wait(0.02)


class ThroughReceiver(ReceiveTransport):
    """A receiver's link that passes everything on; faults override a method."""

    def __init__(self, inner: ReceiveTransport) -> None:
        self._inner = inner
        self.device, self.is_private = inner.device, inner.is_private

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        self._inner.connect(greeting, timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> Frame:
        return self._inner.receive(timeout_s=timeout_s)

    def progress(self) -> None:
        self._inner.progress()

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        self._inner.reply(data, timeout_s=timeout_s)

    def disconnect(self) -> None:
        self._inner.disconnect()

    def close(self) -> None:
        self._inner.close()


class ThroughSender(SendTransport):
    """A sender's link that passes everything on; faults override a method."""

    def __init__(self, inner: SendTransport) -> None:
        self._inner = inner
        self.device, self.outlives_losses = inner.device, inner.outlives_losses

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        return self._inner.poll(timeout_s=timeout_s)

    def is_connected(self, peer: int) -> bool:
        return self._inner.is_connected(peer)

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        return self._inner.open_epoch(peers, timeout_s=timeout_s)

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        return self._inner.buffer(num_bytes, timeout_s=timeout_s)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        self._inner.send(frame, timeout_s=timeout_s)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        return self._inner.collect_replies(timeout_s=timeout_s)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        self._inner.tell(peers, header, timeout_s=timeout_s)

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        return self._inner.some_replies(peers, timeout_s=timeout_s)

    def drop(self, peer: int) -> None:
        self._inner.drop(peer)

    def reset(self) -> None:
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()


class Watched(ThroughSender):
    """A sender's link that notes what it sends, and does something before a message goes out."""

    def __init__(self, inner: SendTransport) -> None:
        super().__init__(inner)
        self.sent: list[str] = []
        self.before: Callable[[str], object] = lambda kind: None

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        self._note(frame.header)
        super().send(frame, timeout_s=timeout_s)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        self._note(header)
        super().tell(peers, header, timeout_s=timeout_s)

    def _note(self, header: bytes) -> None:
        kind = decode(header)[0].kind
        self.before(kind)
        self.sent.append(kind)

    def once(self, kind: str, act: Callable[[], object]) -> None:
        """Do something when the next message of a kind goes out, and note what is sent anew."""

        def meet(going: str) -> None:
            if going == kind:
                self.before = lambda kind: None
                act()

        self.before = meet
        self.sent.clear()

    def lose_at(self, kind: str, receivers: Receivers, name: str) -> None:
        """Lose a receiver, for good, when the next message of a kind goes out."""
        self.once(kind, receivers.serving[name].receiver.close)


Wrap = Callable[[ReceiveTransport], ReceiveTransport]


class Linking(SendTransport, Protocol):
    """A sender's link that makes the other end."""

    def receiver(self) -> ReceiveTransport: ...


class SharedMemory(shared_memory.Sender):
    def receiver(self) -> shared_memory.Receiver:
        return shared_memory.Receiver(self.path)


class Gloo(collective.Sender):
    def receiver(self) -> collective.Receiver:
        return collective.Receiver(*self.address)


LINKS: dict[str, Callable[[], Linking]] = {
    "in process": inprocess.Sender,
    "shared memory": SharedMemory,
    "gloo": Gloo,
}


class Receivers:
    """Receivers in threads of one process, with a link to each rank of their sender."""

    sender: WeightSender

    def __init__(self, links: Sequence[Linking]) -> None:
        self.links = list(links)
        self.serving: dict[str, Serving] = {}

    def add(
        self,
        target: nn.Module | WeightTarget,
        *,
        engine: str = "engine",
        rank: int = 0,
        world: int = 1,
        options: ReceiverOptions | None = None,
        wrap: Wrap = lambda transport: transport,
    ) -> Serving:
        """Start a receiver in a thread; it greets on its own."""
        first, *lanes = [wrap(link.receiver()) for link in self.links]
        receiver = WeightReceiver(
            ModuleTarget(target) if isinstance(target, nn.Module) else target,
            first,
            lanes=lanes,
            engine=engine,
            rank=rank,
            world=world,
            options=options or ReceiverOptions(stall_timeout_s=5),
        )
        self.serving[f"{engine}/{rank}"] = Serving(receiver).start()
        return self.serving[f"{engine}/{rank}"]

    def join(
        self,
        targets: nn.Module | WeightTarget | Mapping[str, nn.Module | WeightTarget],
        **settings: Any,
    ) -> SyncStats:
        """Add an engine, or some by name, and sync once everyone is there."""
        named: Any = targets if isinstance(targets, Mapping) else {"engine": targets}
        for name, target in named.items():
            self.add(target, engine=name, **settings)
        self.wait(len(self.serving))
        return self.sender.send_weights(timeout_s=AMPLE_S)

    def wait(self, count: int) -> None:
        self.sender.wait_for_receivers(count, timeout_s=AMPLE_S)

    def close(self) -> None:
        for serving in self.serving.values():
            serving.stop()
        self.sender.close()


class Fleet(Receivers):
    """A sender and receivers of one process.

    Args:
        source: A module, or what reads weights.
        link: Makes the link.
        wrap: Changes the sender's end of it.
        owner: Whose receivers they are.
    """

    first: SyncStats

    def __init__(
        self,
        source: nn.Module | WeightSource | LocalWeights,
        *,
        options: SenderOptions | None = None,
        link: Callable[[], Linking] = inprocess.Sender,
        wrap: Callable[[SendTransport], SendTransport] = lambda link: link,
        owner: Owner | None = None,
    ) -> None:
        self.transport = link()
        super().__init__([self.transport])
        self.source: Any = source
        self.link: Any = wrap(self.transport)
        source = ModuleSource(source) if isinstance(source, nn.Module) else source
        self.sender = WeightSender(source, self.link, options=options, owner=owner)


@contextlib.contextmanager
def fleet(
    source: nn.Module | WeightSource | LocalWeights,
    *,
    options: SenderOptions | None = None,
    link: Callable[[], Linking] = inprocess.Sender,
    wrap: Callable[[SendTransport], SendTransport] = lambda link: link,
    owner: Owner | None = None,
) -> Iterator[Fleet]:
    made = Fleet(source, options=options, link=link, wrap=wrap, owner=owner)
    try:
        yield made
    finally:
        made.close()
