"""The sender's side of the wire: a plan as messages, and the link that carries them.

No rule of a sync is here: see `round`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasync.delta.backend import Plan
from deltasync.errors import ConfigError, DeltaSyncError, TransportError, WireError
from deltasync.transports.base import Frame, SendTransport
from deltasync.transports.control.connection import Deadline
from deltasync.wire.compression import Compression, compress
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import Begin, Bucket, Failed, Message, Prepare

_READING_S = 0.1


@dataclass(slots=True)
class SentBuckets:
    """What was sent to each receiver.

    Attributes:
        num_buckets, payload_bytes: Number of payloads, and their bytes.
        bucket_bytes: Size of the largest payload.
        lost: Why receivers were lost, by their connection.
    """

    num_buckets: int = 0
    payload_bytes: int = 0
    bucket_bytes: int = 0
    lost: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: SentBuckets) -> SentBuckets:
        """What two ranks have sent to the same receivers."""
        return SentBuckets(
            self.num_buckets + other.num_buckets,
            self.payload_bytes + other.payload_bytes,
            max(self.bucket_bytes, other.bucket_bytes),
            self.lost | other.lost,
        )


class Emitter:
    """Makes the messages that carry one plan: `begin`, each bucket, `prepare`, in this order.

    A round sends all of them, a lane those after `begin`, a file keeps them all. Use it once.

    Args:
        plan: What is sent.
        version: The version that the plan leads to.
        compression: Of the payloads.
        buffer: Returns uint8[num_bytes] memory, into which the next payload is packed.

    Attributes:
        sent: The buckets that the caller has sent: each counts when the next one is asked for.
    """

    def __init__(
        self,
        plan: Plan,
        version: int,
        *,
        compression: Compression,
        buffer: Callable[[int], Tensor],
    ) -> None:
        self._plan, self._version = plan, version
        self._compression, self._buffer = compression, buffer
        self.sent = SentBuckets()

    def begin(self, *, stream_id: str, layout_hash: str, timeout_s: float) -> Begin:
        """The message that announces the plan. Arguments as in `Begin`."""
        plan = self._plan
        return Begin(
            stream_id=stream_id,
            version=self._version,
            base_version=plan.base_version,
            layout_hash=layout_hash,
            sparse_bytes=plan.sparse_bytes,
            dense_bytes=plan.dense_bytes,
            timeout_s=timeout_s,
        )

    def buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket's message, and its uint8[n] payload.

        A compressed payload is host memory of its own; another one is a buffer, which the caller
        sends or keeps before it asks for the next bucket.
        """
        sent = self.sent
        for bucket in self._plan.buckets():
            payload = raw = self._buffer(bucket.num_bytes)
            bucket.write(raw)
            if self._compression != "none":
                data = bytearray(compress(raw.cpu().numpy().data))
                payload = torch.frombuffer(data, dtype=torch.uint8)
            message = Bucket(
                version=self._version,
                sequence=sent.num_buckets,
                num_rows=bucket.num_rows,
                raw_bytes=len(raw),
                compression=self._compression,
            )
            yield message, payload
            sent.num_buckets += 1
            sent.payload_bytes += len(payload)
            sent.bucket_bytes = max(sent.bucket_bytes, len(payload))

    def prepare(self) -> Prepare:
        """The message that ends the buckets."""
        return Prepare(version=self._version, num_buckets=self.sent.num_buckets)


class CallTimeout:
    """The timeout of each wait of a call, and of all of it.

    Args:
        timeout_s: For each wait.
        total_timeout_s: For the whole call, from now on; None for no limit.
    """

    def __init__(self, timeout_s: float, total_timeout_s: float | None = None) -> None:
        if total_timeout_s is not None and not total_timeout_s >= 0:
            raise ConfigError(f"total_timeout_s is {total_timeout_s}; give seconds, or None")
        self._timeout_s = timeout_s
        self._total = None if total_timeout_s is None else Deadline(total_timeout_s)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for the whole call; None for no limit."""
        return None if self._total is None else self._total.remaining_s

    @property
    def wait_s(self) -> float:
        """Seconds for the next wait."""
        total = self._total
        return self._timeout_s if total is None else min(self._timeout_s, total.remaining_s)

    @property
    def is_over(self) -> bool:
        """Whether the time for the whole call has passed."""
        return self._total is not None and self._total.passed


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

    def send_buckets(self, emitter: Emitter) -> None:
        """Send all payloads of a plan, each as it is packed. Raises what `send` raises."""
        for message, payload in emitter.buckets():
            self.send(message, payload)

    def hint(self, message: Message) -> None:
        """Send what may be lost, if there are peers; losing one is found later."""
        if self._epoch:
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
