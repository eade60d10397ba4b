"""The weights that a receiver holds, for those that read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deltasync.delta.backend import Backend
from deltasync.errors import CallOrderError
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.sync.receiver import WeightReceiver


@dataclass(frozen=True, slots=True)
class Proved:
    """Weights whose digests are those of a version.

    Attributes:
        stream_id, version: Of which training run, and which version.
        backend: The weights and their digests. Not owned.
    """

    stream_id: str
    version: int
    backend: Backend


@contextmanager
def proved(receiver: WeightReceiver) -> Iterator[Proved]:
    """Inside, the weights of the version held stay as they are: syncs, and `detach`, wait.

    Raises:
        DirtyReceiver: The weights may mix two versions.
        CallOrderError: No version is held, or the one that is held is not known for certain now.
    """
    with receiver._lock:
        receiver.check_serving()
        session, weights = receiver._session, receiver._weights
        if session.version is None or session.stream_id is None:
            raise CallOrderError(f"{receiver.name} holds no version yet: receive one first")
        if session.detached or weights.may_differ:
            raise CallOrderError(f"the weights of {receiver.name} are detached: attach and rejoin")
        if session.state is ReceiverState.COMMITTED or not weights.are_proved:
            raise CallOrderError(f"{receiver.name} is between two versions: try again after it")
        receiver._synchronize()
        yield Proved(session.stream_id, session.version, weights.backend)
