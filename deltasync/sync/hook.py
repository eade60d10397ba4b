"""Syncing after optimizer steps by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from deltasync.errors import ConfigError, DeltaSyncError, StepApplied
from deltasync.sync.stats import SyncStats

_APPLIED = "the optimizer step was applied, the sync after it failed"


class Sends(Protocol):
    """A `WeightSender`, or a `CrewRank`."""

    def send_weights(self, *, timeout_s: float) -> SyncStats: ...


class StepHook:
    """The handle of `sync_after_step`.

    Attributes:
        steps: Optimizer steps seen.
        syncs: Syncs done.
        failures: Syncs that failed; what they had to send goes with the next one.
        last_stats: What the last sync did, or None.
        last_error: Why the last failed one failed, or None.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sender: Sends,
        *,
        every: int,
        on_error: Literal["continue", "raise"],
        callback: Callable[[SyncStats | DeltaSyncError], None] | None,
        timeout_s: float,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every is {every}; it counts steps, from 1")
        if on_error not in ("continue", "raise"):
            raise ConfigError(f"on_error is {on_error!r}, neither 'continue' nor 'raise'")
        self.steps = self.syncs = self.failures = 0
        self.last_stats: SyncStats | None = None
        self.last_error: DeltaSyncError | None = None
        self._sender, self._every, self._on_error = sender, every, on_error
        self._callback, self._timeout_s = callback, timeout_s
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop syncing. Idempotent."""
        self._handle.remove()

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % self._every == 0:
            self._sync()

    def _sync(self) -> None:
        try:
            stats = self._sender.send_weights(timeout_s=self._timeout_s)
        except DeltaSyncError as error:
            self._failed(error)
        except Exception as error:
            self.failures += 1
            raise StepApplied(f"{_APPLIED}: {type(error).__name__}: {error}") from error
        else:
            self.syncs += 1
            self.last_stats = stats
            if self._callback is not None:
                self._callback(stats)

    def _failed(self, error: DeltaSyncError) -> None:
        self.failures += 1
        self.last_error = error
        if self._callback is not None:
            self._callback(error)
        if self._on_error == "raise":
            raise StepApplied(f"{_APPLIED}: {error}") from error


def sync_after_step(
    optimizer: torch.optim.Optimizer,
    sender: Sends,
    *,
    every: int = 1,
    on_error: Literal["continue", "raise"] = "continue",
    callback: Callable[[SyncStats | DeltaSyncError], None] | None = None,
    timeout_s: float = 60.0,
) -> StepHook:
    """Send the weights after every `every`-th step of `optimizer`.

    Works with any torch optimizer. Steps between two syncs, a failed sync and a step that a
    GradScaler skipped lose nothing: each sync compares with what receivers are known to hold.

    Args:
        optimizer: Whose steps count.
        sender: What sends: a `WeightSender`, or on other ranks of a trainer a `CrewRank`.
        every: Steps from one sync to the next.
        on_error: After a failed sync, "continue" training (it is counted, and the next
            sync covers both) or "raise" StepApplied: the step itself was applied. What is no
            DeltaSyncError (out of memory, say) is always raised so.
        callback: Called with the SyncStats, or with the error, after each sync.
        timeout_s: For `WeightSender.send_weights`.

    Returns:
        The handle; its `remove` ends the syncing.
    """
    return StepHook(
        optimizer,
        sender,
        every=every,
        on_error=on_error,
        callback=callback,
        timeout_s=timeout_s,
    )
