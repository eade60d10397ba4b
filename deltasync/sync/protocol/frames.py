"""A plan as messages: what a round, a lane and a patch file send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltasync.delta.coding import Coder, Coding
from deltasync.delta.snapshot import Bucket as Packing
from deltasync.delta.snapshot import Plan
from deltasync.delta.tiles import Space, table_of
from deltasync.wire.compression import Compression
from deltasync.wire.messages import Begin, Bucket, Message, Prepare, Shares


@dataclass(slots=True)
class SentBuckets:
    """What was sent to each receiver.

    Attributes:
        num_buckets, payload_bytes: Number of payloads, and their bytes.
        bucket_bytes: Size of the largest payload.
        lost: Why receivers were lost, by their connection.
        bytes_by_codec: Of the payloads, see `Coder`.
    """

    num_buckets: int = 0
    payload_bytes: int = 0
    bucket_bytes: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    bytes_by_codec: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: SentBuckets) -> SentBuckets:
        """What two ranks have sent to the same receivers."""
        return SentBuckets(
            self.num_buckets + other.num_buckets,
            self.payload_bytes + other.payload_bytes,
            max(self.bucket_bytes, other.bucket_bytes),
            self.lost | other.lost,
            {
                name: self.bytes_by_codec.get(name, 0) + other.bytes_by_codec.get(name, 0)
                for name in dict.fromkeys((*self.bytes_by_codec, *other.bytes_by_codec))
            },
        )


class Emitter:
    """Makes the messages that carry one plan: `begin`, each bucket, `prepare`, in this order.

    A round sends all of them, a lane those after `begin`, a file keeps them all. Use it once.

    Args:
        plan: What is sent.
        version: The version that the plan leads to.
        compression: Of the payloads.
        buffer: Returns uint8[num_bytes] memory for the next payload as it travels.

    Attributes:
        sent: The buckets that the caller has sent: each counts when the next one is asked for.
    """

    def __init__(
        self,
        plan: Plan,
        version: int,
        *,
        compression: Coding,
        buffer: Callable[[int], Tensor],
    ) -> None:
        self._plan, self._version = plan, version
        self._buffer = buffer
        self._coder = None if compression == "none" else Coder(compression)
        counts = {} if self._coder is None else self._coder.bytes_by_codec
        self.sent = SentBuckets(bytes_by_codec=counts)
        self._raw: Tensor | None = None

    def begin(self, *, stream_id: str, layout_hash: str, timeout_s: float) -> Begin:
        """The message that announces the plan. Arguments as in `Begin`."""
        plan = self._plan
        return Begin(
            stream_id=stream_id,
            version=self._version,
            base_version=plan.base_version,
            layout_hash=layout_hash,
            payload_bytes=plan.payload_bytes,
            places=plan.places,
            timeout_s=timeout_s,
        )

    def buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket's message, and its uint8[n] payload.

        The payload is a buffer, which the caller sends or keeps before it asks for the next bucket.
        """
        sent = self.sent
        for bucket in self._plan.buckets():
            payload, compression = self._packed(bucket)
            sizes = bucket.sizes
            message = Bucket(
                version=self._version,
                sequence=sent.num_buckets,
                item_size=sizes.item_size,  # type: ignore[arg-type]
                tiles=sizes.tiles,
                places=sizes.places,
                whole=sizes.whole,
                compression=compression,
            )
            yield message, payload
            if self._coder is None:
                sent.bytes_by_codec["none"] = sent.payload_bytes + len(payload)
            sent.num_buckets += 1
            sent.payload_bytes += len(payload)
            sent.bucket_bytes = max(sent.bucket_bytes, len(payload))

    def _packed(self, bucket: Packing) -> tuple[Tensor, Compression]:
        """A bucket's payload as it travels, and what was done to it."""
        coder = self._coder
        if coder is None:
            sent = self._buffer(bucket.sizes.num_bytes)
            raw = sent if sent.device == bucket.device else self._scratch(bucket)
            bucket.pack(raw, lambda: None)
            return sent if raw is sent else sent.copy_(raw), "none"
        raw, made = self._scratch(bucket), list[tuple[Tensor, Compression]]()
        bucket.pack(raw, lambda: made.append(coder.coded(raw, bucket)))
        [(coded, compression)] = made
        return self._buffer(len(coded)).copy_(coded), compression

    def _scratch(self, bucket: Packing) -> Tensor:
        """Memory to pack a bucket into before it is coded."""
        raw, num_bytes = self._raw, bucket.sizes.num_bytes
        if raw is None or len(raw) < num_bytes or raw.device != bucket.device:
            self._raw = None  # its memory first
            raw = self._raw = torch.empty(num_bytes, dtype=torch.uint8, device=bucket.device)
        return raw[:num_bytes]

    def send_buckets(
        self, send: Callable[[Message, Tensor], None], *, with_shares: bool = False
    ) -> None:
        """Let `send` have each bucket as it is packed. Raises what that raises.

        Args:
            send: Sends a message with its payload.
            with_shares: Whether somebody has to be told what buckets carry: without it they take
                it for all of the layout.
        """
        if with_shares:
            send(*self.shares())
        for message, payload in self.buckets():
            send(message, payload)

    def shares(self) -> tuple[Shares, Tensor]:
        """The message that says what buckets carry, and its payload."""
        space: Space = self._plan.space
        table = torch.from_numpy(table_of(space))
        payload = self._buffer(len(table)).copy_(table)
        return Shares(version=self._version, num_shares=len(space.given)), payload

    def prepare(self) -> Prepare:
        """The message that ends the buckets."""
        return Prepare(version=self._version, num_buckets=self.sent.num_buckets)
