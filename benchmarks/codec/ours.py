"""Changes as deltasync sends them: frames with buckets, through the coder of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.codec.change import Change
from deltasync.delta.coding import Coding, coded
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.shard import whole
from deltasync.delta.staging import LiveWeights
from deltasync.delta.tiles import Space
from deltasync.files.classes.codec import ClassCodec as ClassCodec  # codes by `class`
from deltasync.wire import frame
from deltasync.wire.messages import Begin, Bucket

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Ours:
    """One coding of payloads.

    Attributes:
        name: For tables.
        coding: What is asked for.
    """

    name: str
    coding: Coding

    def encode(self, change: Change) -> list[tuple[bytes, bytes]]:
        """(header, payload) of each frame."""
        frames = list[tuple[bytes, bytes]]()
        for sequence, (raw, bucket) in enumerate(change.payloads):
            made, compression = coded(self.coding, raw, bucket)
            payload, sizes = made.numpy().tobytes(), bucket.sizes
            message = Bucket(
                version=1,
                sequence=sequence,
                item_size=sizes.item_size,  # type: ignore[arg-type]
                tiles=sizes.tiles,
                places=sizes.places,
                whole=sizes.whole,
                compression=compression,
            )
            frames.append((frame.encode(message, payload_bytes=len(payload)), payload))
        return frames

    def decode(self, frames: Sequence[tuple[bytes, bytes]], change: Change) -> list[Bytes]:
        """uint8[n] payloads as they were packed, all checks of a receiver included."""
        live = LiveWeights(change.flats, Space(whole(change.specs)))
        reader, found = PayloadReader(live), list[Bytes]()
        sizes = [bucket.sizes for _, bucket in change.payloads]
        begin = Begin(
            stream_id="codec",
            version=1,
            base_version=0,
            layout_hash="0" * 64,
            payload_bytes=sum(one.num_bytes for one in sizes),
            places=sum(one.places for one in sizes),
            timeout_s=0.0,
            attempt=1,
        )
        reader.begin(begin)
        for header, payload in frames:
            message, _ = frame.decode(header, arrived_bytes=len(payload))
            assert isinstance(message, Bucket)
            sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            found.append(reader.read(message, sent).changes.memory.numpy())
        return found


OURS: tuple[Ours, ...] = (
    Ours("deltasync: gap, ulp, zstd", "gap"),
    Ours("deltasync: class", "class"),
)
