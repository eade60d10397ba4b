"""Messages over a transport: the sender's side of the wire, without any rule of a sync."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress

from torch import Tensor

from deltasync.errors import DeltaSyncError, TransportError, WireError
from deltasync.sync.call_timeout import CallTimeout
from deltasync.transports.base import Frame, SendTransport
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import Failed, Message

_READING_S = 0.1


class SenderLink:
    """Sends messages to the peers of an epoch and reads their answers, each within `timeout_s`."""

    def __init__(self, transport: SendTransport) -> None:
        self._transport = transport
        self._epoch: tuple[int, ...] = ()
        self._unread: deque[tuple[int, bytes]] = deque()  # greetings
        self.limit = CallTimeout(60.0)

    @property
    def timeout_s(self) -> float:
        """For the next wait."""
        return self.limit.wait_s

    def open(self, peers: Sequence[int]) -> dict[int, TransportError]:
        """Speak to `peers` from now on. Returns those that could not be reached."""
        if tuple(peers) == self._epoch and all(map(self.is_connected, peers)):
            return {}
        self._epoch = ()
        failed = self._transport.open_epoch(peers, timeout_s=self.timeout_s)
        if not failed:
            self._epoch = tuple(peers)
        return failed

    @property
    def is_open(self) -> bool:
        """Whether there are peers to speak to."""
        return bool(self._epoch)

    def greetings(self, *, timeout_s: float) -> list[tuple[int, Message | WireError, int]]:
        """The first message of each new peer, and its bytes.

        Reading many of them takes time: what is left after `_READING_S` is for the next call.
        """
        if not self._unread:
            self._unread.extend(self._transport.poll(timeout_s=timeout_s))
        end, read = time.monotonic() + _READING_S, list[tuple[int, Message | WireError, int]]()
        while self._unread and (not read or time.monotonic() < end):
            peer, data = self._unread.popleft()
            read.append((peer, _decoded(data), len(data)))
        return read

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """Send to every peer of the epoch. Raises TransportError after dropping whom it lost."""
        header = encode(message, payload_bytes=0 if payload is None else len(payload))
        self._transport.send(Frame(header, payload), timeout_s=self.timeout_s)

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] to pack the next payload into. Raises what `send` raises."""
        return self._transport.buffer(num_bytes, timeout_s=self.timeout_s)

    def hint(self, message: Message, peers: Collection[int]) -> None:
        """Send to the peers of the epoch if they are among `peers`; losing one is found later."""
        if self._epoch and set(self._epoch) <= set(peers):
            with suppress(TransportError):
                self.send(message)

    def replies(self) -> dict[int, Message | DeltaSyncError]:
        """The next answer of each peer of the epoch, or why there is none."""
        replies = self._transport.collect_replies(timeout_s=self.timeout_s)
        return {
            peer: reply if isinstance(reply, TransportError) else _decoded(reply)
            for peer, reply in replies.items()
        }

    def last_words(self, peers: Sequence[int]) -> dict[int, str]:
        """Why those of `peers` have failed that are gone and said so. Ends the epoch if one is."""
        gone = [peer for peer in peers if not self.is_connected(peer)]
        if not gone:
            return {}
        self._epoch = ()
        try:
            # Not with the others: they read a payload still.
            self._transport.open_epoch(gone, timeout_s=self.timeout_s)
            replies = self._transport.collect_replies(timeout_s=0)
        except TransportError:
            return {}
        said = {peer: _decoded(data) for peer, data in replies.items() if isinstance(data, bytes)}
        return {peer: reason_of(m) for peer, m in said.items() if isinstance(m, Failed)}

    def is_connected(self, peer: int) -> bool:
        return self._transport.is_connected(peer)

    def drop(self, peer: int) -> None:
        """End the connection to a peer."""
        if peer in self._epoch:
            self._epoch = ()
        self._transport.drop(peer)

    def close(self) -> None:
        self._transport.close()


def reason_of(reply: Message | DeltaSyncError, *, answered: str = "answered") -> str:
    """Why a peer failed: what it said, what it did not answer, or `answered` with another kind."""
    match reply:
        case Failed(error=error, reason=reason):
            return f"{error}: {reason}"
        case DeltaSyncError():
            return f"{type(reply).__name__}: {reply}"
        case _:
            return f"ProtocolViolation: {answered} with {reply.kind}"


def _decoded(data: bytes) -> Message | WireError:
    try:
        return decode(data)[0]
    except WireError as error:
        return error
