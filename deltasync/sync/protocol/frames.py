"""A plan as messages: what a round, a lane and a patch file send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasync.delta.backend import Plan
from deltasync.wire.compression import Compression, compress
from deltasync.wire.messages import Begin, Bucket, Message, Prepare


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

    def send_buckets(self, send: Callable[[Message, Tensor], None]) -> None:
        """Let `send` have each bucket as it is packed. Raises what that raises."""
        for message, payload in self.buckets():
            send(message, payload)

    def prepare(self) -> Prepare:
        """The message that ends the buckets."""
        return Prepare(version=self._version, num_buckets=self.sent.num_buckets)
