"""One worker of an engine: receives and stages while it generates, writes when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.config import network_secret
from deltasync.delta.routes.loading import Loader
from deltasync.errors import (
    ConfigError,
    DirtyReceiver,
    ProtocolViolation,
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from deltasync.integrations.connection import Connection, SentTensors
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.proof.proving import Proof, Upkeep
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.staging_thread import StagingThread
from deltasync.sync.target.base import WeightTarget
from deltasync.sync.target.routed import RoutedTarget, Routes
from deltasync.wire.frame import encode
from deltasync.wire.messages import Failed

_TURN_S = 0.05
_WELCOME_S = 1.0


class Worker:
    """A worker's connection to a trainer, if it has one.

    Attributes:
        is_written: Whether a trainer has written the weights, or begun to.
    """

    def __init__(self) -> None:
        self._proved: dict[SentTensors, Upkeep | None] = {}  # what has to follow for which tensors
        self._unproved: tuple[SentTensors, RoutedTarget] | None = None  # until it holds a version
        self._routes: dict[str, Routes] = {}  # that are proved, by checkpoint name
        self._is_as_started, self.is_written = True, False
        self._spoiled: DirtyReceiver | None = None
        self._is_asleep = self._is_half_written = False
        self._open = ExitStack()
        self._receiver: WeightReceiver | None = None
        self._staging: StagingThread | None = None
        self._timeout_s = 0.0

    def connect(
        self,
        to: Connection,
        target: WeightTarget,
        device: torch.device,
        *,
        rank: int,
        world: int,
        replica: int = 0,
    ) -> None:
        """Connect to a trainer; `disconnect` first.

        Args:
            to: The trainer.
            target: The worker's weights.
            device: Where they are.
            rank: Of this worker in its replica.
            world: Workers of the replica.
            replica: Of the engine, which is data parallel.
        """
        first, *lanes = [a.receiver(device, secret=network_secret()) for a in to.addresses]
        receiver = WeightReceiver(
            target,
            first,
            lanes=lanes,
            engine=f"{to.engine}-{replica}",
            rank=rank,
            world=world,
            options=ReceiverOptions(max_staged_bytes=to.max_staged_bytes),
            half_written=self._is_half_written,
        )
        self._receiver = receiver
        self._staging = self._open.enter_context(StagingThread(receiver))
        self._open.callback(receiver.close)  # first, which wakes the thread
        self._timeout_s = to.timeout_s

    def routed(
        self,
        model: nn.Module,
        to: Connection,
        started_on: Callable[[], Iterable[tuple[str, Tensor]]],
        proof: Callable[[], Proof],
    ) -> RoutedTarget:
        """The worker's weights by routes that lead there.

        Raises ConfigError, by name, and DirtyReceiver as `proving`.

        Args:
            model: The worker's.
            to: The trainer.
            started_on: Reads the checkpoint that the engine has loaded, and worked on since. Not
                asked once others have loaded another.
            proof: Makes what updates are held against.
        """
        with self.proving():
            sent, checkpoint = to.sent(), to.checkpoint()
            if sent in self._proved:
                target = RoutedTarget(model, checkpoint, upkeep=self._proved[sent])
                target.parameters()
                return target
            if self._is_as_started:
                target = RoutedTarget(model, checkpoint, is_written=self.is_written)
                how = proof if to.unproved == "refuse" else None
                target.verify_routes(started_on(), how, keep=to.keep, routes=self._routes)
                self._note_proved(sent, target)
                return target
            target = _Unproved(model, checkpoint, is_proved=self._holds_any)
            target.parameters()  # so that the trainer hears at once what has no route
            if to.unproved == "refuse":
                target.verify_updates(proof(), keep=to.keep)
            self._unproved = sent, target
            return target

    def _note_proved(self, sent: SentTensors, target: RoutedTarget) -> None:
        self._proved[sent] = target.upkeep
        self._routes |= target.routes()

    @contextmanager
    def proving(self) -> Iterator[None]:
        """For proofs, in which the engine holds other weights than its own.

        Raises DirtyReceiver from the first proof on that cannot put the engine's own back: nothing
        but a new start of the engine is known to mend all that it computes with.
        """
        self._check_whole()
        try:
            yield
        except DirtyReceiver as error:
            self._spoiled = error
            raise

    def _check_whole(self) -> None:
        if self._spoiled is not None:
            raise DirtyReceiver(str(self._spoiled))

    def decline(self, to: Connection, device: torch.device, error: Exception) -> None:
        """Tell a trainer, which waits for this worker to connect, why it does not. Does not wait:
        the trainer may begin to listen only when all workers have been told to connect.
        """
        reason = f"{to.engine}: {error}"  # by which the trainer knows that it is meant
        failed = Failed(version=None, error=type(error).__name__, reason=reason[:4096])
        link = to.addresses[0].receiver(device, secret=network_secret())

        def tell() -> None:
            with link, suppress(TransportError):  # it hangs up, or is gone
                link.connect(encode(failed), timeout_s=to.timeout_s)
                link.receive(timeout_s=to.timeout_s)

        threading.Thread(target=tell, name="deltasync-decline", daemon=True).start()

    def commit(self, version: int) -> None:
        """Write the version that is staged, or about to be received.

        Raises what a commit raises; the worker keeps the old version then, unless it was received
        in place: a full sync, or one that could not be staged. Raises DirtyReceiver as `proving`.
        """
        self._check_whole()
        self.check_awake()
        if self._staging is None:
            raise ConfigError("no trainer is connected to this worker: let it connect first")
        deadline = time.monotonic() + self._timeout_s
        written = None
        while written is None:
            self._await(self._staging, version, deadline)
            if self._holds(version):
                return  # it has joined with it
            self.is_written = True
            written = self._written(self._staging)
        if written != version:
            raise ProtocolViolation(f"v{written} was written, v{version} was asked for")

    def _await(self, staging: StagingThread, version: int, deadline: float) -> None:
        """Wait until a version is staged, or this one is held."""
        while not (staging.is_staged() or self._holds(version)):
            error = staging.last_error
            if isinstance(error, ConfigError) and not self._holds_any():
                raise error  # waiting does not mend it
            staging.wait_staged(timeout_s=_TURN_S)
            if time.monotonic() > deadline:
                raise staging.last_error or self._too_late(version)

    def _written(self, staging: StagingThread) -> int | None:
        """Commit. None if the sender gave up before anything was written: it tries again, without
        whoever failed.
        """
        try:
            return staging.commit()
        except SyncAborted as error:
            if not error.may_follow:
                raise
            return None

    def _too_late(self, version: int) -> TransportTimeout:
        state = "outside" if self._receiver is None else self._receiver.state.name.lower()
        return TransportTimeout(f"v{version} was not staged in time: this worker is {state}")

    def _holds(self, version: int) -> bool:
        here = self._receiver
        return here is not None and (here.version, here.state) == (version, ReceiverState.READY)

    def _holds_any(self) -> bool:
        return self._receiver is not None and self._receiver.version is not None

    def sleep(self) -> None:
        """Leave the weights alone until `wake`: the engine is about to release their memory."""
        self._is_asleep = True
        if self._receiver is None:
            return
        deadline = time.monotonic() + _WELCOME_S
        while self._receiver.state is ReceiverState.JOINING and time.monotonic() < deadline:
            time.sleep(_TURN_S / 10)  # a welcome may be on its way, from a sync that is over
        self._receiver.detach()

    def wake(self) -> None:
        """Look at the weights again. If they are as they were they take the next delta."""
        self._is_asleep = False
        if self._receiver is not None:
            self._receiver.attach()

    def check_awake(self) -> None:
        """Raises ConfigError while the weights sleep."""
        if self._is_asleep:
            raise ConfigError(
                "the engine's weights sleep, so that nothing can be written: wake them up (vLLM: "
                "wake_up, SGLang: resume_memory_occupation) before send_weights"
            )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a trainer."""
        return self._receiver is not None

    def disconnect(self) -> None:
        """End the connection, if there is one. The weights stay as they are."""
        if self._unproved is not None and self._holds_any():
            self._note_proved(*self._unproved)
        self._unproved = None
        receiver, self._receiver, self._staging = self._receiver, None, None
        self._open.close()
        if receiver is not None:
            self._is_half_written = receiver.is_half_written

    def reloaded(self) -> None:
        """End the connection: others load weights now, of which this worker knows nothing."""
        self.disconnect()
        self._is_as_started = self._is_half_written = False


class _Unproved(RoutedTarget):
    """An engine that others have loaded: its weights are the trainer's, or stay as they are.

    That they are, read back after all that the engine does when it loads, proves its routes.
    """

    def __init__(self, *args: Any, is_proved: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_proved = is_proved

    def loader(self) -> Loader | None:
        """Raises ConfigError while the routes are not proved."""
        if not self._is_proved():
            raise ConfigError(
                "others have loaded this engine, with other weights than the trainer's as they are "
                "now, so that nothing shows where it keeps them: let them load the trainer's, and "
                "send weights again"
            )
        return super().loader()
