"""The transport contract: frames and buffers between one sender and its receivers.

A transport knows no names, dtypes or versions. A frame is opaque header bytes
and one contiguous uint8 payload. The sender is the centre of a star; a *peer*
is one connection, numbered by the sender in order of arrival and never
reused: a receiver that connects again is a new peer. The first message on a
connection is the receiver's greeting, given to `poll`. Frames go to the peers
of the current *epoch* only. A peer that fails is dropped, never repaired.

On a GPU a payload is ordered by the current stream of the calling thread: what was enqueued there
before `send` is done before the payload is read, what is enqueued after `receive` or `buffer`
comes after whatever last filled or read that memory. A payload may still be on its way when `send`
returns; what then becomes of it is told by the next call that waits for peers.

Neither end is thread-safe: one thread at a time uses it, except that `close`
may be called from any thread and wakes a blocked call with TransportClosed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from deltasync.errors import TransportError


@dataclass(frozen=True, slots=True)
class Frame:
    """What travels.

    Attributes:
        header: Opaque bytes, never empty.
        payload: uint8[n], contiguous; None for a frame without one. On a device that the
            transport's capabilities list.
    """

    header: bytes
    payload: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Facts that a caller may act on; never the transport's name.

    Attributes:
        devices: torch device types that payloads may live on.
        max_payload_bytes: Largest payload of one frame, or None for memory alone.
        zero_copy: Whether a payload packed into `buffer()` is sent without another copy.
        detects_loss: Whether a peer that dies is noticed before a timeout runs out.
    """

    devices: tuple[str, ...]
    max_payload_bytes: int | None
    zero_copy: bool
    detects_loss: bool


class Closing(Protocol):
    """What the end of a `with` closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every connection for good. Idempotent."""
        ...


class SendTransport(Closing, Protocol):
    """The sender's end. Every timeout is in seconds and covers the whole call."""

    @property
    def capabilities(self) -> Capabilities: ...

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        """Greetings of peers that connected since the last call, in order of arrival.

        Returns as soon as there is one, or an empty list after `timeout_s`. It may go on for a
        moment for those whose greeting has begun to arrive, and leave some for the next call.
        """
        ...

    def is_connected(self, peer: int) -> bool:
        """Whether `peer` still holds its connection. Never blocks."""
        ...

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Make `peers` the receivers of what is sent from now on.

        Returns the peers that could not be reached and why: they are dropped. The epoch is
        open if the result is empty; otherwise call again with the others.
        """
        ...

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """uint8[num_bytes] to pack the next payload into, owned by the transport.

        May block until receivers have let go of an earlier payload, and raises what `send`
        raises. Its content is unspecified. It is valid until the next `send`.
        """
        ...

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Hand `frame` to every peer of the epoch, in order.

        The payload may be the last `buffer()`, which is then no longer the caller's, or any
        other tensor, which may be overwritten once `send` returned.

        Raises PeerLost or TransportTimeout after the peers concerned were dropped; the
        frame has then reached the other peers or not, and they stay in the epoch.
        """
        ...

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        """The next reply of every peer that was in the epoch when it was opened.

        A peer that died or was dropped has PeerLost in its place, one that did not answer in
        time TransportTimeout; both are dropped.

        A payload on its way when a peer is lost may not reach the others either, who then cannot
        answer it. A frame without a payload reaches them: let one that wants the answer follow.
        """
        ...

    def drop(self, peer: int) -> None:
        """End the connection to `peer`. Idempotent. What was sent before still arrives."""
        ...


class ReceiveTransport(Closing, Protocol):
    """A receiver's end."""

    @property
    def capabilities(self) -> Capabilities: ...

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """Connect anew as a new peer and greet. Ends a connection that was open before.

        Waits for the sender to appear; TransportTimeout if it does not.
        """
        ...

    def receive(self, *, timeout_s: float) -> Frame:
        """The next frame. Its payload stays valid, and is read only, until the next
        `receive`, `connect` or `close`.

        Raises TransportTimeout when none came (the connection stays good and a later call may
        succeed), PeerLost when the connection ended.
        """
        ...

    def progress(self) -> None:
        """Let the next payload come while the last frame is read, which stays valid. Never blocks.

        For a connected end that will soon receive again. Raises PeerLost.
        """
        ...

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        """Answer the sender. Raises PeerLost."""
        ...

    def disconnect(self) -> None:
        """End the connection; what was replied before still arrives. Idempotent.

        The next `connect` makes a new peer.
        """
        ...
