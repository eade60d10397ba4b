"""What the ends of this process report of each sync, and what listens to that.

Every end reports here, and nowhere else: what measures, logs or traces syncs subscribes. If nothing
has subscribed, an end makes no event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from traceback import format_exception_only
from typing import Literal

from deltasync.transports.base import Closing

logger = logging.getLogger(__name__)

Phase = tuple[str, float, float]
"""(name, begin, end) of a part of a sync, in seconds since the sync began."""


class SyncEvent:
    """One sync at one end of this process, or one that failed.

    Do not keep the events of failures: their errors keep what the failed calls have in memory.

    `SyncStats`, `PublishStats`, `ReceiveStats` or `SyncFailed`.
    """

    __slots__ = ()


Listener = Callable[[SyncEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveStats(SyncEvent):
    """One sync at a receiver: from a trainer or a store.

    Attributes:
        name: Of the receiver: engine[rank/world].
        stream_id: The training run; of a store, the run.
        version: The version held now.
        base_version: The version that the delta was taken against; None for a full sync.
        kind: "delta"; "full"; "joined" if the weights were those of the version already.
        num_bytes: Indices and values that were announced; of a store, the bytes fetched.
        staged_bytes: Memory that staging took.
        is_in_place: Whether it was written as it arrived, in the pause.
        was_dirty: Whether the weights were dirty before.
        stage_s: From the beginning of the sync until everything is staged and predicted; in place,
            until everything is written.
        commit_s: Time to write and read back.
        pause_s: How long the engine had to pause: the call of `commit`; of `receive_weights` or
            `fetch`, what it took since the sync began.
        total_s: From the beginning of the sync until `commit` has returned.
        ended_at: When it ended, in seconds since the Unix epoch.
        phases: Parts of it: "fetch" (of a store), "stage", "wait" for the decision, "ready" until
            the engine commits, "commit".
    """

    name: str
    stream_id: str
    version: int
    base_version: int | None
    kind: Literal["delta", "full", "joined"]
    num_bytes: int = 0
    staged_bytes: int = 0
    is_in_place: bool = False
    was_dirty: bool = False
    stage_s: float = 0.0
    commit_s: float = 0.0
    pause_s: float = 0.0
    total_s: float = 0.0
    ended_at: float = 0.0
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFailed(SyncEvent):
    """A sync that failed at one end. The error is raised there too.

    Attributes:
        role: Which end: "sender", "publisher", or "receiver" (also of a store).
        error: What was raised.
        name: Of a receiver: engine[rank/world]. Empty at a trainer.
        stream_id: The training run, if it is known.
        version: The version that was attempted, if it is known.
        lost: As of `SyncStats`.
        receivers: At a sender, how many still hold its last version.
        is_dirty: Whether the receiver must not serve.
        corrupted: The parameter in which the scrub found other weights than were written; empty if
            it found none.
        total_s: How long it took until then.
        ended_at: When it failed, in seconds since the Unix epoch.
        phases: Parts of it, as far as it came.
    """

    role: Literal["sender", "publisher", "receiver"]
    error: BaseException
    name: str = ""
    stream_id: str | None = None
    version: int | None = None
    lost: dict[str, str] = field(default_factory=dict)
    receivers: int | None = None
    is_dirty: bool = False
    corrupted: str = ""
    total_s: float = 0.0
    ended_at: float = 0.0
    phases: tuple[Phase, ...] = ()

    @property
    def reason(self) -> str:
        """The error in one line: its type and its text."""
        return f"{type(self.error).__name__}: {self.error}"


class Subscription(Closing):
    """What `subscribe` returns. Use it as a context manager, or `close` it, or keep it for good."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.last_error = ""  # that was logged

    def close(self) -> None:
        """Report no more events to the listener. Idempotent; any thread may call it."""
        with suppress(ValueError):  # closed already
            subscriptions.remove(self)


subscriptions: list[Subscription] = []
"""All of them. Without a lock, which a fork could leave held."""


def subscribe(listener: Listener) -> Subscription:
    """Call `listener` after each sync of any end in this process, successful or not.

    It is called in the thread of the sync, after the sync is over; the events of a `commit` come
    with the receiver's next call, when the engine's pause is over. Be quick: the next sync waits.
    What the listener raises is logged and affects no sync.

    Args:
        listener: Takes one event. It need not know every kind.

    Returns:
        What ends the subscription.
    """
    subscription = Subscription(listener)
    subscriptions.append(subscription)
    return subscription


def report(event: SyncEvent) -> None:
    """Let all listeners know."""
    for subscription in tuple(subscriptions):
        try:
            subscription.listener(event)
        except Exception as error:  # which must not fail a sync that is over
            why = "".join(format_exception_only(error))  # also if it has no text
            if why != subscription.last_error:
                subscription.last_error = why
                logger.exception("a listener failed at %s; syncs go on", type(event).__name__)


@contextmanager
def reporting(make: Callable[[BaseException], SyncFailed]) -> Iterator[None]:
    """Report what is raised inside."""
    try:
        yield
    except BaseException as error:
        if subscriptions:
            report(make(error))
        raise
