"""Syncs that follow optimizer steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch

from deltasync.errors import ConfigError, DeltaSyncError, StepApplied
from deltasync.sync.protocol.links import CallTimeout
from deltasync.sync.stats import SyncStats
from deltasync.trainers.stepped import check_stepped
from deltasync.transports import forks

logger = logging.getLogger(__name__)

_APPLIED = "the optimizer step was applied, the sync after it failed"


class SupportsSendWeights(Protocol):
    """A `WeightSender`, a `TrainerRank`, or an `EngineSync`.

    Attributes:
        world: Ranks of the trainer.
    """

    @property
    def world(self) -> int: ...

    def refresh_source(self) -> None: ...

    def send_weights(
        self,
        *,
        timeout_s: float,
        total_timeout_s: float | None = None,
        on_source_read: Callable[[], None] | None = None,
    ) -> SyncStats: ...


class StepHook:
    """Send the weights after every `every`-th step of `optimizer`.

    Works with any torch optimizer. Nothing is lost by steps between two syncs, by a failed sync, or
    by a step that a GradScaler skipped: each sync compares with what receivers are known to hold.

    What changes after `step` is sent one step late: masters that a wrapper copies back, router
    biases, averages (EMA), later hooks. Call `sender.send_weights` after such a change instead.

    Raises ConfigError if the source has none of the parameters that the optimizers step, and warns
    by name of those that are not sent. A source without a `module` is not checked.

    Args:
        optimizer: The optimizer whose steps are counted; of several, in the order in which they
            step, the last one. If a wrapper has no step hooks, as accelerate's, pass the optimizer
            within it if that steps the model's own parameters.
        sender: A `WeightSender` or an `EngineSync`; on other ranks of a trainer, a `TrainerRank`.
        every: Steps from one sync to the next.
        on_error: After a failed sync, "raise" StepApplied (the step itself was applied), or
            "continue": the next sync covers both, and a warning is logged after 1, 2, 4, 8 ...
            failures in a row.
            Errors that are no DeltaSyncError always raise.
        on_busy: None: the step returns when the sync is done. Otherwise the step returns at once: a
            thread syncs during the next step's forward and backward passes, and the optimizer waits
            only until the weights have been read. Until then nothing else may change them: no
            earlier step hook, and no forward pass that updates buffers that are sent. If receivers
            still stage or write when the next sync is due, "wait" for them, or "skip" that sync;
            the next one covers both. After the last step call `wait`, then `sender.send_weights`.
            The first sync, one after a failure, and one within `atexit` run within the step. A
            later step or `wait` raises the error of a background sync.
        callback: Called with the SyncStats, or with the error, after each sync, in its thread. In
            that of a background sync, steps and `wait` raise ConfigError.
        timeout_s: For `send_weights`: each wait for receivers.
        total_timeout_s: For `send_weights`: the whole call; None for no limit.

    Attributes:
        steps: Optimizer steps seen.
        syncs: Syncs done.
        failures: Syncs that failed; the next sync covers them.
        skipped: Syncs left out because another one was in flight.
        last_stats: The stats of the last sync, or None.
        last_error: The error of the last failed sync, or None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sender: SupportsSendWeights,
        *,
        every: int = 1,
        on_error: Literal["continue", "raise"] = "continue",
        on_busy: Literal["wait", "skip"] | None = None,
        callback: Callable[[SyncStats | DeltaSyncError], None] | None = None,
        timeout_s: float = 60.0,
        total_timeout_s: float | None = None,
    ) -> None:
        optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        for one in optimizers:
            if not hasattr(one, "_optimizer_step_post_hooks"):
                raise ConfigError(
                    f"optimizer is a {type(one).__name__}, which runs no step hooks: if one within "
                    "it steps the model's own parameters, give that; if it copies masters into the "
                    "model, call sender.send_weights() after its step, instead of this hook"
                )
        if not hasattr(sender, "send_weights"):
            raise ConfigError(f"sender is a {type(sender).__name__}; give a WeightSender")
        if not optimizers:
            raise ConfigError("no optimizer was given, whose steps count")
        if every < 1:
            raise ConfigError(f"every is {every}; it counts steps, from 1")
        if on_error not in ("continue", "raise"):
            raise ConfigError(f"on_error is {on_error!r}, neither 'continue' nor 'raise'")
        if on_busy not in ("wait", "skip", None):
            raise ConfigError(f"on_busy is {on_busy!r}, neither 'wait' nor 'skip' nor None")
        CallTimeout(timeout_s, total_timeout_s)  # raises before a step does
        if on_busy == "skip" and sender.world > 1:
            raise ConfigError("ranks of a trainer cannot skip, each when it is busy: say 'wait'")
        check_stepped(optimizers, getattr(getattr(sender, "sender", sender), "source", None))
        self.steps = self.syncs = self.failures = self.skipped = 0
        self.last_stats: SyncStats | None = None
        self.last_error: DeltaSyncError | None = None
        self._sender, self._every, self._on_error = sender, every, on_error
        self._callback, self._on_busy = callback, on_busy
        self._timeout_s, self._total_timeout_s = timeout_s, total_timeout_s
        self._is_removed = False
        self._thread = _own_thread()
        self._sync_under_way: Future[None] | None = None
        self._source_read = threading.Event()
        self._syncing: threading.Thread | None = None  # that of syncs in the background
        self._failed_in_a_row = 0
        self._is_settled = False  # the last sync was one of all receivers
        self._is_starting = False  # an interrupt may have come between a sync and its future
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._handles = [one.register_step_pre_hook(before) for one in optimizers]
        self._handles.append(optimizers[-1].register_step_post_hook(after))
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """In a forked child, steps sync nothing and wait for nothing: the parent has the sender."""
        self._is_removed = True
        self._thread, self._source_read = _own_thread(), threading.Event()
        self._sync_under_way = self._syncing = None

    def remove(self) -> None:
        """Stop syncing. Waits for the sync in flight, except in its own callback. Idempotent.

        If that sync fails, `wait` raises its error, before or after this call.
        """
        self._is_removed = True
        self._thread.shutdown(wait=not self._is_in_callback)
        for handle in self._handles:
            handle.remove()

    def wait(self) -> None:
        """Return when no sync is in flight. Raises StepApplied as a step does.

        Raises ConfigError in the callback of a background sync, which would wait for itself.
        """
        if (ended := self._ended()) is not None:
            ended.result()

    @property
    def _is_in_callback(self) -> bool:
        """Whether this is the thread of background syncs, in which callbacks run."""
        return threading.current_thread() is self._syncing

    def _check_thread(self, call: str) -> None:
        """Raise ConfigError for a call that would wait for its own thread."""
        if self._is_in_callback:
            raise ConfigError(
                f"{call} in the callback of a sync in the background would wait for itself: "
                "do it in the thread that trains"
            )

    def _ended(self) -> Future[None] | None:
        """Wait for the sync in flight and return it; after an interrupt it is still in flight."""
        self._check_thread("hook.wait()")
        if self._is_starting:
            self._thread.shutdown()  # when whatever was submitted has ended
            self._thread, self._is_starting = _own_thread(), False
        if self._sync_under_way is not None:
            wait([self._sync_under_way])
        ended, self._sync_under_way = self._sync_under_way, None
        return ended

    def _before_step(self, *_: Any) -> None:
        """Wait until the sync has read the weights, which the step changes."""
        self._check_thread("an optimizer step")
        if self._is_starting:
            self._ended()
        if self._sync_under_way is not None:
            self._source_read.wait()

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % self._every:
            return
        under_way = self._sync_under_way
        if self._on_busy == "skip" and under_way is not None and not under_way.done():
            self.skipped += 1
            return
        ended = self._ended()
        try:
            if not self._is_removed:  # the callback of the sync that has ended may do that
                self._begin()
        finally:  # ranks of a trainer have counted this call, whatever the last one raised
            if ended is not None:
                ended.result()

    def _begin(self) -> None:
        if self._on_busy is None or not self._is_settled:
            self._sync()
            return
        try:
            self._sender.refresh_source()
        except (DeltaSyncError, MemoryError, RuntimeError):  # raised again in the sync, for all
            self._sync()
            return
        self._source_read.clear()
        self._is_starting = True
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            self._sync_under_way = self._thread.submit(self._sync_meanwhile, stream)
        except RuntimeError:  # no thread can start: none is left, or the interpreter shuts down
            self._thread = _own_thread()  # the old one may have kept what it did not start
            self._sync()
        self._is_starting = False

    def _sync_meanwhile(self, stream: torch.cuda.Stream | None) -> None:
        """Sync in a thread, after all work that `stream` has now."""
        self._syncing = threading.current_thread()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._sync(self._source_read.set)
        finally:
            self._source_read.set()

    def _sync(self, on_source_read: Callable[[], None] | None = None) -> None:
        self._is_settled = False
        try:
            stats = self._sender.send_weights(
                timeout_s=self._timeout_s,
                total_timeout_s=self._total_timeout_s,
                on_source_read=on_source_read,
            )
        except DeltaSyncError as error:
            self._failed(error)
        except Exception as error:
            self.failures += 1
            raise StepApplied(f"{_APPLIED}: {type(error).__name__}: {error}") from error
        else:
            self.syncs, self._failed_in_a_row = self.syncs + 1, 0
            self.last_stats, self._is_settled = stats, True
            if self._callback is not None:
                self._callback(stats)

    def _failed(self, error: DeltaSyncError) -> None:
        self.failures += 1
        self.last_error = error
        if self._callback is not None:
            self._callback(error)
        if self._on_error == "raise":
            raise StepApplied(f"{_APPLIED}: {error}") from error
        self._warn(error)

    def _warn(self, error: DeltaSyncError) -> None:
        """Log a failure after which training continues; less often while syncs keep failing."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row.bit_count() == 1:  # 1, 2, 4, 8 ...
            logger.warning(
                "the sync after step %d failed, %d in a row, %d in all: %s: %s; "
                "training goes on, the next sync covers it",
                *(self.steps, self._failed_in_a_row, self.failures),
                *(type(error).__name__, error),
            )


def _own_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="deltasync-sync")


sync_after_step = StepHook
"""`StepHook`, as users make one."""
