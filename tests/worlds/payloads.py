"""Changes by hand, as receivers get them: packed into payloads that do not last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.bits import Live
from deltasync.delta.payloads import PayloadReader
from deltasync.delta.shard import whole
from deltasync.delta.staging import LiveWeights, Staging, staged_bytes_of
from deltasync.delta.tiles import Space
from deltasync.wire.messages import Begin, Bucket, ParameterSpec
from tests.wire import reference
from tests.wire.reference import Tile
from tests.worlds.peers import begin

POISON = 0xEE  # of bytes that are not written, or not there any more


def measured(flats: Mapping[int, Live], specs: Sequence[ParameterSpec]) -> LiveWeights:
    """Weights with their digests."""
    live = LiveWeights(flats, Space(whole(specs)))
    live.ledger.sums[:] = live.measure(np.arange(live.space.num_chunks))
    return live


def begin_of(*, payload_bytes: int, places: int) -> Begin:
    return begin(version=1, base_version=0, payload_bytes=payload_bytes, places=places)


def bucket_of(tiles: Sequence[Tile], item_size: int) -> tuple[Bucket, Tensor]:
    """The message and the payload of changes, right or not."""
    sizes = reference.sizes(tiles, item_size)
    payload = torch.frombuffer(bytearray(reference.payload(tiles, item_size)), dtype=torch.uint8)
    return Bucket(version=1, sequence=0, compression="none", **sizes), payload


def stage_tiles(
    live: LiveWeights,
    tiles: Iterable[Tile],
    *,
    in_place: bool = False,
) -> Staging:
    """Bring changes to a receiver, each payload overwritten when it was taken over."""

    def size_of(tile: Tile) -> int:
        return int(live.space.item_size[live.space.share[tile.number]])

    buckets = [bucket_of(list(some), size) for size, some in groupby(tiles, size_of)]
    sizes = {
        "payload_bytes": sum(len(payload) for _, payload in buckets),
        "places": sum(bucket.places for bucket, _ in buckets),
    }
    reader = PayloadReader(live)
    reader.begin(begin_of(**sizes))
    staging = Staging(live, max_bytes=staged_bytes_of(**sizes), in_place=in_place)
    for bucket, payload in buckets:
        received = reader.read(bucket, payload)
        staging.stage(received)
        payload.fill_(POISON)
    return staging
