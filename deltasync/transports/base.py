"""The transport contract: frames and buffers between one sender and its receivers.

A transport knows nothing of names, dtypes or versions. A frame is opaque header bytes and one
contiguous uint8 payload. One sender is connected to many receivers. A *peer* is one connection.
The sender numbers peers in order of arrival and never reuses a number: a receiver that reconnects
is a new peer. The first message on a connection is the receiver's greeting, which `poll` returns.
Frames go only to the peers of the current *epoch*. A peer that fails is dropped, never repaired.

On a GPU, payloads follow the current stream of the calling thread. Work enqueued there before
`send` finishes before the payload is read. Work enqueued after `receive` or `buffer` runs after
the last access to that memory. When `send` returns, the payload may still be in flight; the next
call that waits for peers reports its outcome.

Neither end is thread-safe: one thread at a time may use it. Only `close` may be called from any
thread; it wakes a blocked call with TransportClosed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from deltasync.errors import TransportError


@dataclass(frozen=True, slots=True)
class Frame:
    """The unit that a transport moves.

    Attributes:
        header: Opaque bytes, never empty.
        payload: uint8[n], contiguous, on the transport's device; None for a frame without a
            payload. One of no bytes arrives as None.
        follows_loss: At a receiver: the frame before it had a payload that does not come, since it
            was lost with another peer; see `SendTransport.outlives_losses`.
    """

    header: bytes
    payload: Tensor | None = None
    follows_loss: bool = False


class Closing(Protocol):
    """A context manager that closes at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every connection for good. Idempotent."""
        ...


class SendTransport(Closing, Protocol):
    """The sender's end. Every timeout is in seconds and covers the whole call.

    Callers decide by these facts, never by a transport's name.

    Attributes:
        device: Where payloads live.
        outlives_losses: Whether the other peers of an epoch get every frame, although a peer was
            lost or dropped as it was sent.
    """

    device: torch.device
    outlives_losses: bool = False

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        """Return the greetings of peers that connected since the last call, in order of arrival.

        Returns as soon as there is one, or an empty list after `timeout_s`. It may wait a little
        longer for greetings that have begun to arrive, and leave some for the next call.
        """
        ...

    def is_connected(self, peer: int) -> bool:
        """Return whether the last call that looked found `peer` connected. Looks at nothing."""
        ...

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Make `peers` the receivers of all frames from now on.

        Returns the peers that could not be reached, with the reason; they are dropped. The epoch
        is open if the result is empty; otherwise call again with the other peers.
        """
        ...

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """Return uint8[num_bytes] to pack the next payload into, owned by the transport.

        May block until receivers have released an earlier payload, and raises what `send` raises.
        The content is unspecified. The buffer is valid until the next `send`.
        """
        ...

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Send `frame` to every peer of the epoch, in order.

        The payload is the tensor that `buffer` returned last, which the caller then no longer
        owns. Raises ConfigError for another one.

        Raises PeerLost or TransportTimeout after dropping the failed peers. The other peers stay
        in the epoch; the frame may or may not have reached them, unless `outlives_losses`.
        """
        ...

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        """Send a frame without a payload to some peers of the epoch. Raises as `send`."""
        ...

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        """Return the next reply of every peer that was in the epoch when it was opened.

        A dead or dropped peer has PeerLost instead of a reply, and one that did not reply in time
        has TransportTimeout; both are dropped.

        If a peer is lost while a payload is in flight, the payload may not reach the other peers
        either, and they cannot reply to it. Frames without a payload do reach them: ask for a
        reply in such a frame, after the payload.
        """
        ...

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        """Return the next reply of those of `peers` that have one, as soon as one of them has.

        A dead or dropped peer has PeerLost instead. Empty after `timeout_s`; nobody is dropped.
        """
        ...

    def drop(self, peer: int) -> None:
        """Close the connection to `peer`. Idempotent. What was sent before still arrives."""
        ...

    def reset(self) -> None:
        """Close every connection, in whatever state an interrupted call has left it. Idempotent.

        Peers may connect again.
        """
        ...


class ReceiveTransport(Closing, Protocol):
    """The receiver's end. Every timeout is in seconds and covers the whole call.

    Attributes:
        device: Where payloads live.
        is_private: Whether nobody else can write to a payload that was handed out.
    """

    device: torch.device
    is_private: bool = False

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """Connect as a new peer and send the greeting. Closes an earlier connection.

        Waits for the sender to appear; raises TransportTimeout if it does not.
        """
        ...

    def receive(self, *, timeout_s: float) -> Frame:
        """Return the next frame.

        Its payload is read-only, and valid until the next `receive`, `connect` or `close`.

        Raises TransportTimeout if no frame arrived (the connection stays open, and a later call may
        succeed), and PeerLost if the connection has ended.
        """
        ...

    def progress(self) -> None:
        """Let the next payload arrive while the last frame, which stays valid, is read.

        Takes a moment at most. Call it often, if ever, on a connected end that will soon receive
        again: others may wait for this one. Raises PeerLost.
        """
        ...

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        """Send a reply. Raises PeerLost."""
        ...

    def disconnect(self) -> None:
        """Close the connection. Idempotent. What was replied before still arrives.

        The next `connect` makes a new peer.
        """
        ...
