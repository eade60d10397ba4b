"""Changes as deltasync sends them: frames with buckets, through the encoder of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.codec.change import Change
from benchmarks.codec.shapes import Found
from deltasync.delta.bucket import BucketReader
from deltasync.delta.codecs.base import unsigned_dtype
from deltasync.delta.codecs.decoding import decode_payload
from deltasync.delta.codecs.encoding import encode_payload
from deltasync.delta.codecs.old import LiveOld
from deltasync.delta.host.packing import buckets
from deltasync.delta.shard import whole
from deltasync.store.classes.codec import ClassCodec as ClassCodec  # codes rows by `class`
from deltasync.wire import frame
from deltasync.wire.codecs import IndexCodec
from deltasync.wire.compression import Compression
from deltasync.wire.messages import Bucket

_BUCKET_BYTES = 64 << 20  # the default of a sender on CPUs


@dataclass(frozen=True, slots=True)
class Ours:
    """One codec of the wire format, with zstd or without.

    Attributes:
        name: For tables.
        codec: Of sparse rows.
        is_compressed: Whether zstd comes on top.
    """

    name: str
    codec: IndexCodec
    is_compressed: bool

    def encode(self, change: Change) -> list[tuple[bytes, bytes]]:
        """(header, payload) of each frame."""
        frames = list[tuple[bytes, bytes]]()
        made = buckets(change.runs, whole(change.specs), bucket_bytes=_BUCKET_BYTES)
        for sequence, bucket in enumerate(made):
            raw = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            bucket.write(raw)
            compression, payload = self._coded(raw, bucket.num_rows, change)
            message = Bucket(
                version=1,
                sequence=sequence,
                num_rows=bucket.num_rows,
                raw_bytes=bucket.num_bytes,
                compression=compression,
            )
            frames.append((frame.encode(message, payload_bytes=len(payload)), payload))
        return frames

    def decode(self, frames: Sequence[tuple[bytes, bytes]], change: Change) -> Found:
        """The bits of each row, all checks of a receiver included."""
        reader, found = BucketReader(change.specs), Found()
        for header, payload in frames:
            message, _ = frame.decode(header, arrived_bytes=len(payload))
            assert isinstance(message, Bucket)
            raw = torch.from_numpy(self._raw(message, payload, change))
            for parameter, run in reader.read(raw, message.num_rows):
                assert run.indices is not None
                assert run.bits is not None
                indices = run.indices.numpy() + np.int32(run.start)
                kind = unsigned_dtype(change.specs[parameter].dtype)
                found.append((indices, run.bits.numpy().view(kind)))
        return found

    def _coded(self, raw: torch.Tensor, num_rows: int, change: Change) -> tuple[Compression, bytes]:
        old = LiveOld(change.specs, change.flats)
        payload = encode_payload(raw.numpy(), num_rows, old, self.codec).to_bytes(
            compressed=self.is_compressed
        )
        return ("coded", payload) if len(payload) < len(raw) else ("none", raw.numpy().tobytes())

    def _raw(self, message: Bucket, payload: bytes, change: Change) -> np.ndarray:
        if message.compression != "coded":
            return np.frombuffer(bytearray(payload), np.uint8)
        return decode_payload(
            memoryview(payload),
            message.num_rows,
            message.raw_bytes,
            LiveOld(change.specs, change.flats),
            numels=np.array([spec.numel for spec in change.specs], np.uint64),
            item_sizes=np.array([spec.dtype.item_size for spec in change.specs], np.uint64),
        )


OURS: tuple[Ours, ...] = (
    Ours("deltasync: gap, ulp, zstd", IndexCodec.GAP, is_compressed=True),
    Ours("deltasync: block", IndexCodec.BLOCK, is_compressed=False),
    Ours("deltasync: class", IndexCodec.CLASS, is_compressed=True),
)
