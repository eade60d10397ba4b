"""Syncing after optimizer steps by themselves."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch

from deltasync.errors import ConfigError, DeltaSyncError, ReceiversLost, StepApplied
from deltasync.sync.stats import OnLost, SyncStats, judged
from deltasync.transports import forks

logger = logging.getLogger(__name__)

_QUIET_S = 60.0  # longest, between two warnings of syncs that fail
_APPLIED = "the optimizer step was applied, the sync after it failed"


class SupportsSendWeights(Protocol):
    """What sends after steps: a `WeightSender`, a `TrainerRank`, or an `EngineSync`.

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
    """The handle of `sync_after_step`.

    Attributes:
        steps: Optimizer steps seen.
        syncs: Syncs done.
        failures: Syncs that failed; what they had to send goes with the next one.
        skipped: Syncs left out because another one was under way.
        last_stats: What the last sync did, or None.
        last_error: Why the last failed one failed, or None.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        sender: SupportsSendWeights,
        *,
        every: int,
        on_error: Literal["continue", "raise"],
        on_busy: Literal["wait", "skip"] | None,
        on_lost: OnLost,
        callback: Callable[[SyncStats | DeltaSyncError], None] | None,
        timeout_s: float,
        total_timeout_s: float | None,
    ) -> None:
        for one in optimizers:
            if not hasattr(one, "register_step_post_hook"):
                raise ConfigError(f"optimizer is a {type(one).__name__}, not one of torch")
            if not hasattr(one, "_optimizer_step_post_hooks"):
                wrapper = type(one).__name__
                raise ConfigError(f"{wrapper} runs no step hooks: give the optimizer inside it")
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
        if on_lost not in ("continue", "raise"):
            raise ConfigError(f"on_lost is {on_lost!r}, neither 'continue' nor 'raise'")
        if on_busy == "skip" and sender.world > 1:
            raise ConfigError("ranks of a trainer cannot skip, each when it is busy: say 'wait'")
        self.steps = self.syncs = self.failures = self.skipped = 0
        self.last_stats: SyncStats | None = None
        self.last_error: DeltaSyncError | None = None
        self._sender, self._every, self._on_error = sender, every, on_error
        self._callback, self._on_busy, self._on_lost = callback, on_busy, on_lost
        self._timeout_s, self._total_timeout_s = timeout_s, total_timeout_s
        self._is_removed = False
        self._thread = _own_thread()
        self._sync_under_way: Future[None] | None = None
        self._source_read = threading.Event()
        self._syncing: threading.Thread | None = None  # that of syncs in the background
        self._warned_at, self._quiet_s = -math.inf, 0.0
        self._unmentioned = 0  # failures since the last warning
        self._is_settled = False  # the last sync was one of all receivers
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._handles = [one.register_step_pre_hook(before) for one in optimizers]
        self._handles.append(optimizers[-1].register_step_post_hook(after))
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """In a child, steps sync nothing and wait for nothing: the sender is the parent's."""
        self._is_removed = True
        self._thread, self._source_read = _own_thread(), threading.Event()
        self._sync_under_way = self._syncing = None

    def remove(self) -> None:
        """Stop syncing; wait for the sync under way, but in its own callback. Idempotent.

        What that sync raises, `wait` raises, before or after.
        """
        self._is_removed = True
        self._thread.shutdown(wait=not self._is_in_callback)
        for handle in self._handles:
            handle.remove()

    def wait(self) -> None:
        """Return when no sync is under way. Raises StepApplied as a step does.

        Raises ConfigError in the callback of a sync in the background, which would wait for itself.
        """
        if (ended := self._ended()) is not None:
            ended.result()

    @property
    def _is_in_callback(self) -> bool:
        """Whether this is the thread of syncs in the background, in which callbacks run."""
        return threading.current_thread() is self._syncing

    def _check_thread(self, call: str) -> None:
        """Raise ConfigError for what would wait for its own thread."""
        if self._is_in_callback:
            raise ConfigError(
                f"{call} in the callback of a sync in the background would wait for itself: "
                "do it in the thread that trains"
            )

    def _ended(self) -> Future[None] | None:
        """The sync that was under way, when it is not any more; if interrupted, it still is."""
        self._check_thread("hook.wait()")
        if self._sync_under_way is not None:
            wait([self._sync_under_way])
        ended, self._sync_under_way = self._sync_under_way, None
        return ended

    def _before_step(self, *_: Any) -> None:
        """The step changes what a sync reads."""
        self._check_thread("an optimizer step")
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
        except (DeltaSyncError, RuntimeError):  # raised anew, in a call that other ranks hear of
            self._sync()
            return
        self._source_read.clear()
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            self._sync_under_way = self._thread.submit(self._sync_meanwhile, stream)
        except RuntimeError:  # no thread can start: none is left, or the interpreter shuts down
            self._thread = _own_thread()  # the old one may have kept what it did not start
            self._sync()

    def _sync_meanwhile(self, stream: torch.cuda.Stream | None) -> None:
        """In a thread of its own, which begins after all that `stream` holds now."""
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
            self.syncs += 1
            self.last_stats, self._is_settled = stats, True
            if self._callback is not None:
                self._callback(stats)
            try:
                judged(stats, self._on_lost)
            except ReceiversLost as error:
                raise StepApplied(f"the optimizer step was applied; {error}") from error

    def _failed(self, error: DeltaSyncError) -> None:
        self.failures += 1
        self.last_error = error
        if self._callback is not None:
            self._callback(error)
        if self._on_error == "raise":
            raise StepApplied(f"{_APPLIED}: {error}") from error
        self._warn(error)

    def _warn(self, error: DeltaSyncError) -> None:
        """Log a failure that training goes on after; less often while syncs keep failing."""
        self._unmentioned += 1
        now = time.monotonic()
        since_s = now - self._warned_at
        if since_s < self._quiet_s:
            return
        is_new = since_s > 2 * _QUIET_S
        self._quiet_s = 1.0 if is_new else min(2 * self._quiet_s, _QUIET_S)
        logger.warning(
            "the sync after step %d failed, %d in all, %d since the last warning: %s: %s; "
            "training goes on, the next sync covers it",
            *(self.steps, self.failures, self._unmentioned),
            *(type(error).__name__, error),
        )
        self._warned_at, self._unmentioned = now, 0


def _own_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="deltasync-sync")


def sync_after_step(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    sender: SupportsSendWeights,
    *,
    every: int = 1,
    on_error: Literal["continue", "raise"] = "continue",
    on_busy: Literal["wait", "skip"] | None = None,
    on_lost: OnLost = "continue",
    callback: Callable[[SyncStats | DeltaSyncError], None] | None = None,
    timeout_s: float = 60.0,
    total_timeout_s: float | None = None,
) -> StepHook:
    """Send the weights after every `every`-th step of `optimizer`.

    Works with any torch optimizer. Steps between two syncs, a failed sync and a step that a
    GradScaler skipped lose nothing: each sync compares with what receivers are known to hold.

    Args:
        optimizer: Whose steps count; or all that train the model, in the order in which they step,
            of which the last one's count.
        sender: What sends: a `WeightSender`, or on other ranks of a trainer a `TrainerRank`, or an
            `EngineSync`.
        every: Steps from one sync to the next.
        on_error: After a failed sync, "continue" training (it is counted, the next sync covers
            both, and a warning is logged, at most one a minute in the long run) or "raise"
            StepApplied: the step itself was applied. What is no DeltaSyncError (out of memory, say)
            is always raised so.
        on_busy: None: the step returns when the sync is done. Otherwise it returns at once: a
            thread syncs while the next step's forward and backward passes run, and the optimizer
            waits only until the weights have been read. Nothing else may change them before: no
            step hooks that were registered earlier, and no forward passes that keep statistics in
            buffers which are sent. If receivers still stage or write when
            the next sync is due, "wait" for them, or "skip" it: the one after covers both. A sync
            that has to start anew (the first, and after a failure) is done in the step; so is one
            for which no thread can start, as within `atexit`. What a sync in the background
            raises, a later step raises, or `wait`.
        on_lost: After a sync that some receivers left, "continue" training (`SyncStats.lost` has
            them, and each is logged) or "raise" StepApplied, whose cause is the ReceiversLost. The
            others hold the step; it is counted, and the callback has its stats.
        callback: Called with the SyncStats, or with the error, after each sync, by its thread. In
            that of a sync in the background, steps and `wait` raise ConfigError: they would wait
            for the callback itself.
        timeout_s: For `send_weights`: each wait on receivers.
        total_timeout_s: For `send_weights`: the whole call; None for no limit.

    Returns:
        The handle; its `remove` ends the syncing.
    """
    return StepHook(
        optimizer if isinstance(optimizer, Sequence) else [optimizer],
        sender,
        every=every,
        on_error=on_error,
        on_busy=on_busy,
        on_lost=on_lost,
        callback=callback,
        timeout_s=timeout_s,
        total_timeout_s=total_timeout_s,
    )
