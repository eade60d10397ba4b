"""One worker of an engine: it receives and stages while it generates, and writes on request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from deltasync.config import network_secret
from deltasync.delta.modes import in_plain_mode
from deltasync.engines.proof.learnt import learn_routes
from deltasync.engines.proof.proving import Proof, Upkeep
from deltasync.engines.proof.reach import Copies
from deltasync.engines.proof.recomputed import Learnt
from deltasync.engines.proof.unwritten import unwritten
from deltasync.engines.routed import RoutedTarget, Routes, pieces_of
from deltasync.engines.routes.recorder import CheckpointTensor
from deltasync.errors import (
    ConfigError,
    DirtyReceiver,
    EngineTaken,
    LayoutMismatch,
    ProtocolViolation,
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from deltasync.integrations.trainer_info import SentTensors, TrainerInfo, Work
from deltasync.observe.environment import subscribe_metrics
from deltasync.sync.options import ReceiverOptions
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.staging_thread import StagingThread
from deltasync.sync.target.base import WeightTarget
from deltasync.wire.frame import encode
from deltasync.wire.messages import Failed, as_text

logger = logging.getLogger(__name__)

_TURN_S = 0.05
_WELCOME_S = 1.0


class Worker:
    """A worker's connection to a trainer, if it has one.

    Attributes:
        knows_copy: Whether the copy of the last `ReloadedTarget`, or before one the checkpoint that
            the engine was started on, is what the engine holds.
    """

    def __init__(self) -> None:
        self._proved: dict[SentTensors, tuple[Upkeep | None, Learnt | None]] = {}
        self._unproved: tuple[SentTensors, RoutedTarget] | None = None  # until it holds a version
        self._routes: dict[str, Routes] = {}  # proved ones, by checkpoint name
        self._beside: dict[str, Tensor] = {}  # what is kept for learnt routes
        self._is_as_started = self.knows_copy = True
        self._spoiled: DirtyReceiver | None = None
        self._is_asleep = self._is_half_written = self._is_copy = False
        self._unwritten: Copies | None = None  # while its memory is given up
        # What the trainer sends that was let connect last, and which tensors it fills with that.
        self._sent: SentTensors | None = None
        self._filled: set[str] = set()
        self._is_lost = False  # what that trainer sent, until it sends it again
        self._open = ExitStack()
        self._receiver: WeightReceiver | None = None
        self._staging: StagingThread | None = None
        self._timeout_s = 0.0
        self._last: TrainerInfo | None = None  # that was let connect
        self._since = ""

    def connect(
        self,
        trainer: TrainerInfo,
        target: WeightTarget,
        device: torch.device,
        *,
        rank: int,
        world: int,
        replica: str = "0",
    ) -> None:
        """Connect to a trainer, whose earlier connection ends. Raises as `admit`, and ConfigError.

        Args:
            trainer: The trainer.
            target: The worker's weights.
            device: The device of the weights.
            rank: Rank of this worker in its replica.
            world: Number of workers in the replica.
            replica: Names the replica among those that were let connect at once.
        """
        self.admit(trainer)
        if self._is_lost and trainer.sent() != self._sent:
            raise ConfigError(
                "what the last trainer sent was given up in a sleep, and this one sends other "
                "tensors: let the last one send its weights again first, or restart the engine"
            )
        subscribe_metrics()
        first, *lanes = [a.receiver(device, secret=network_secret()) for a in trainer.addresses]
        receiver = WeightReceiver(
            target,
            first,
            lanes=lanes,
            engine=f"{trainer.engine}-{replica}",
            rank=rank,
            world=world,
            options=ReceiverOptions(max_staged_bytes=trainer.max_staged_bytes),
            half_written=self._is_half_written,
        )
        self._receiver, self._sent = receiver, trainer.sent()
        self._is_copy = not isinstance(target, RoutedTarget)
        self._filled = target.filled() if isinstance(target, RoutedTarget) else set()
        self._staging = self._open.enter_context(StagingThread(receiver))
        self._open.callback(receiver.close)  # first, which wakes the thread
        self._timeout_s = trainer.timeout_s
        self._last, self._since = trainer, time.strftime("%F %T UTC", time.gmtime())

    def admit(self, trainer: TrainerInfo) -> None:
        """End the connection to the trainer that was let connect last.

        Raises EngineTaken if that is another one, it is still there, and this one does not ask to
        take over.
        """
        last = self._last
        holders = (trainer.holder, trainer.continues)
        is_other = last is not None and last.holder not in holders and not trainer.take_over
        if last is not None and is_other and self._is_held(trainer, last):
            raise EngineTaken(
                f"the engine follows another trainer since {self._since}: {last.holder}; stop "
                "that one, or connect this one with take_over=True"
            )
        if self._receiver is not None:
            self.disconnect()

    def _is_held(self, trainer: TrainerInfo, last: TrainerInfo) -> bool:
        """Whether the connection to the last one stands, or does again after a sync that failed.

        It has ended if another trainer listens at its address and is being greeted there, or if
        the last one has not asked for a write for longer than it waits.
        """
        here = self._receiver
        if here is None:
            return False
        time.sleep(5 * _TURN_S)  # in which its thread notices that a trainer has just ended
        deadline = time.monotonic() + _WELCOME_S
        while self._is_outside and time.monotonic() < deadline:
            time.sleep(_TURN_S)
        is_there = trainer.addresses[0] == last.addresses[0] and trainer.sender != last.sender
        is_greeted = is_there and here.state is ReceiverState.JOINING
        is_late = self._staging is not None and self._staging.waits_s > last.timeout_s
        return here.is_connected and not (is_greeted or is_late)

    @in_plain_mode
    def routed(
        self,
        model: nn.Module,
        trainer: TrainerInfo,
        started_on: Callable[[], Iterable[tuple[str, Tensor]]],
        proof: Callable[[], Proof],
    ) -> RoutedTarget:
        """Return the worker's weights as a target that writes through routes.

        Raises ConfigError, which names a tensor, DirtyReceiver as `proving`, and as `admit`.

        Args:
            model: The worker's model.
            trainer: The trainer.
            started_on: Reads the checkpoint that the engine was started on. Not called after
                something else has loaded weights.
            proof: Makes the proof that updates have to pass.
        """
        self.admit(trainer)
        with self.proving():
            sent, checkpoint = trainer.sent(), trainer.checkpoint()
            if sent in self._proved:
                upkeep, learnt = self._proved[sent]
                target = RoutedTarget(model, checkpoint, learnt=learnt)
                target.upkeep = upkeep
                target.parameters()
                return target
            if self._is_as_started:

                def verified(target: RoutedTarget) -> RoutedTarget:
                    target.verify_routes(
                        started_on(),
                        proof if trainer.unproved == "refuse" else None,
                        keep=trainer.keep,
                        routes=self._routes,
                    )
                    self._note_proved(sent, target)
                    return target

                watched = RoutedTarget(model, checkpoint)
                try:
                    return verified(watched)
                except ConfigError as error:
                    learnt = _learnt(proof, checkpoint, watched, error, self._beside)
                    if learnt is None:
                        raise
                    logger.info("deltasync: the engine moves what it has loaded: %s", error)
                return verified(RoutedTarget(model, checkpoint, learnt=learnt))
            target = _Unproved(model, checkpoint, is_proved=self._holds_any)
            target.parameters()  # raises now if a tensor has no route
            if trainer.unproved == "refuse":
                target.verify_updates(proof(), keep=trainer.keep)
            self._unproved = sent, target
            return target

    def _note_proved(self, sent: SentTensors, target: RoutedTarget) -> None:
        self._proved[sent] = target.upkeep, target.learnt
        self._routes |= target.routes()

    @contextmanager
    def proving(self) -> Iterator[None]:
        """The context of a proof, in which the engine holds other weights than its own.

        Raises DirtyReceiver if a proof cannot restore the engine's own weights, and on every later
        use: only a restart of the engine is known to repair everything that it computes with.
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

    def decline(self, trainer: TrainerInfo, device: torch.device, error: Exception) -> None:
        """Report to a trainer why this worker does not connect.

        Returns at once: a thread reports, because the trainer may begin to listen only after every
        worker was asked to connect.
        """
        reason = f"{trainer.engine}: {error}"  # the trainer recognises its engine by the name
        kind = ConfigError if isinstance(error, LayoutMismatch) else type(error)
        failed = Failed(version=None, error=kind.__name__, reason=as_text(reason))
        link = trainer.addresses[0].receiver(device, secret=network_secret())

        def tell() -> None:
            with link, suppress(TransportError):  # the trainer closes the connection, or is gone
                link.connect(encode(failed), timeout_s=trainer.timeout_s)
                link.receive(timeout_s=trainer.timeout_s)

        threading.Thread(target=tell, name="deltasync-decline", daemon=True).start()

    def commit(self, version: int, holder: str, *, work: Work = "write") -> None:
        """Write the version that is staged, or about to be received.

        Args:
            version: The version.
            holder: The `TrainerInfo.holder` of who asks.
            work: "pass" if it changes no weight, so that the engine may compute meanwhile. "name"
                writes nothing, and raises unless the worker holds the version.

        Raises what a commit raises. The worker then keeps the old version, unless the sync was
        received in place: a full sync, or one too large to stage. Raises DirtyReceiver as
        `proving`, and EngineTaken if another trainer was let connect since.
        """
        self._check_holder(holder)
        if work == "name":
            self._check_version(version)
            return
        self._check_whole()
        self.check_awake()
        if self._staging is None:
            raise ConfigError("no trainer is connected to this worker: let it connect first")
        deadline = time.monotonic() + self._timeout_s
        before = None if self._is_outside else self._staging.last_error
        written = None
        while written is None:
            self._await(self._staging, version, deadline, before)
            if self._holds(version):
                return  # it joined with this version
            staged = self._receiver and self._receiver.upcoming
            if staged not in (None, version):  # a call that is late: its pause is over
                raise ProtocolViolation(f"v{staged} is staged, v{version} was asked for")
            is_changed = self._receiver is not None and not self._receiver.is_unchanged
            if work == "pass" and is_changed:
                raise ProtocolViolation(f"v{version} changes weights, and was said to change none")
            written = self._written(self._staging)
        if written != version:
            raise ProtocolViolation(f"v{written} was written, v{version} was asked for")

    def _check_holder(self, holder: str) -> None:
        """Raise EngineTaken if another trainer than this one was let connect last."""
        if self._last is not None and self._last.holder != holder:
            raise EngineTaken(
                f"another trainer has taken the engine at {self._since}: {self._last.holder}; stop "
                "that one, or connect this one with take_over=True"
            )

    def _check_version(self, version: int) -> None:
        """Raise unless the worker holds it, or is about to hear so."""
        here, deadline = self._receiver, time.monotonic() + self._timeout_s
        ends = (ReceiverState.READY, ReceiverState.OUTSIDE)  # others may be about to hold it
        while here is not None and here.version != version and here.state not in ends:
            if time.monotonic() > deadline:
                break
            time.sleep(_TURN_S / 10)
        if here is None or here.version != version:
            raise ProtocolViolation(f"v{version} cannot be named: this worker does not hold it")

    def _await(
        self, staging: StagingThread, version: int, deadline: float, before: Exception | None
    ) -> None:
        """Wait until a version is staged, or this one is held.

        Another error than the one `before` ends that: whoever greets again joins in a later call of
        the trainer.
        """
        while not (staging.is_staged() or self._holds(version)):
            error = staging.last_error
            is_refused = isinstance(error, ConfigError) and not self._holds_any()
            if error is not None and (is_refused or error is not before):
                raise error  # waiting does not help
            staging.wait_staged(timeout_s=_TURN_S)
            if time.monotonic() > deadline:
                raise staging.last_error or self._too_late(version)

    def _written(self, staging: StagingThread) -> int | None:
        """Commit. Returns None if the sender aborted before anything was written: it retries
        without the receivers that failed.
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

    @property
    def _is_outside(self) -> bool:
        return self._receiver is not None and self._receiver.state is ReceiverState.OUTSIDE

    def _holds_any(self) -> bool:
        return self._receiver is not None and self._receiver.version is not None

    def sleep(self) -> None:
        """Do not touch the weights until `wake`: the engine is about to release their memory."""
        self._is_asleep = True
        if self._receiver is None:
            return
        deadline = time.monotonic() + _WELCOME_S
        while self._receiver.state is ReceiverState.JOINING and time.monotonic() < deadline:
            time.sleep(_TURN_S / 10)  # the welcome of a sync that has ended may be in flight
        self._receiver.detach()

    def discard(self, model: nn.Module, loaded: Collection[int] | None = None) -> None:
        """Like `sleep`, when the engine keeps no copy of its weights: the next sync is a full one.

        What that sync will not write is kept on the host, and `wake` puts it back: everything, if
        weights are reloaded, or no trainer has connected yet. `connect` then refuses trainers of
        other tensors until the last one has sent what is lost.

        Args:
            model: The worker's model, whose memory is still there.
            loaded: As of `unwritten`.
        """
        self.disconnect()
        self.knows_copy = False
        if not self._is_asleep:
            self._unwritten = unwritten(model, self._filled, loaded)
            self._is_lost |= bool(self._filled)
        self.sleep()

    @contextmanager
    def released(
        self, model: nn.Module | None, loaded: Collection[int] | None = None
    ) -> Iterator[None]:
        """Around the release of memory: `discard`, or `sleep` without a model.

        If the release raises, this ends what it began.
        """
        was_asleep = self._is_asleep
        if model is None:
            self.sleep()
        else:
            self.discard(model, loaded)
        try:
            yield
        except BaseException:
            if not was_asleep:
                self.wake()
            raise

    def wake(self) -> None:
        """Use the weights again. If they have not changed, they take the next delta."""
        if self._unwritten is not None:
            self._unwritten.put_back()
            self._unwritten = None
        self._is_asleep = False
        if self._receiver is not None:
            self._receiver.attach()

    def check_awake(self) -> None:
        """Raise ConfigError while the weights sleep."""
        if self._is_asleep:
            raise ConfigError(
                "the engine's weights sleep, so that nothing can be written: wake them up (vLLM: "
                "wake_up, SGLang: resume_memory_occupation) before send_weights"
            )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a trainer."""
        return self._receiver is not None

    def disconnect(self, holder: str | None = None) -> None:
        """End the connection, if there is one. The weights stay as they are.

        Args:
            holder: As of `commit`, if a trainer asks for it.
        """
        if holder is not None:
            self._check_holder(holder)
        if self._unproved is not None and self._holds_any():
            self._note_proved(*self._unproved)
        self._unproved = None
        receiver, self._receiver, self._staging = self._receiver, None, None
        self._open.close()
        if receiver is not None:
            self._is_half_written = receiver.is_half_written
            if receiver.version is not None or self._is_half_written:
                self.knows_copy = self._is_copy and not self._is_half_written
            self._is_lost &= receiver.version is None or self._is_half_written

    def reloaded(self) -> None:
        """End the connection, because something else loads weights that this worker cannot know."""
        self.disconnect()
        self._is_as_started = self._is_half_written = self.knows_copy = False


def _learnt(
    proof: Callable[[], Proof],
    checkpoint: Sequence[CheckpointTensor],
    watched: RoutedTarget,
    error: ConfigError,
    beside: dict[str, Tensor],
) -> Learnt | None:
    """Routes that are not those of the live engine's loader; None if there are no others.

    Raises ConfigError if the live engine cannot load a second time, and nothing can be learnt.
    """
    try:
        found = learn_routes(proof(), checkpoint, beside)
    except ConfigError as reason:
        if pieces_of(watched) is None and str(reason) not in str(error):
            raise ConfigError(f"{error}; in a second instance of the model, {reason}") from reason
        return None
    return None if found.pieces == pieces_of(watched) else found


class _Unproved(RoutedTarget):
    """The weights of an engine that something other than deltasync has loaded.

    Nothing is written until the weights, read back through the routes, were found equal to the
    trainer's. This proves the routes, because the engine loaded and processed those weights itself.
    """

    def __init__(self, *args: Any, is_proved: Callable[[], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_proved = is_proved

    def check_full_sync(self) -> None:
        """Raise ConfigError while the routes are not proved."""
        if not self._is_proved():
            raise ConfigError(
                "others have loaded this engine, with other weights than the trainer's as they are "
                "now, so that nothing shows where it keeps them: let them load the trainer's, and "
                "send weights again"
            )
