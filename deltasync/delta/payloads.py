"""Payloads as they come: inflated, checked, and seen as changes of what a lane carries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltasync.delta import gap
from deltasync.delta.changes import Changes
from deltasync.delta.coding import codec_of
from deltasync.delta.staging import LiveWeights, Received
from deltasync.delta.tiles import Space, space_of
from deltasync.errors import InvalidIndices, LimitExceeded
from deltasync.wire.changes import ALIGNMENT
from deltasync.wire.compression import inflate
from deltasync.wire.messages import Begin, Bucket

_MOST_BYTES = 4 * ALIGNMENT  # of the payload of an element alone: all columns but `whole`


def check_begin(begin: Begin, space: Space) -> None:
    """Raises LimitExceeded if no sync of a layout, as a space, is as large.

    Ranks may share it out in any way: at most, each element is alone in a payload.
    """
    numel = int(space.share_numel.sum())
    if begin.payload_bytes > _MOST_BYTES * numel or begin.places > numel:
        raise LimitExceeded(f"no sync of a layout of {numel} elements takes so much")


class PayloadReader:
    """Takes the payloads of a sync apart, in the order of each lane, checking each bound.

    Args:
        live: The weights that they change.
        lanes: Connections on which they come.
    """

    def __init__(self, live: LiveWeights, lanes: int = 1) -> None:
        self._live = live
        self._lanes = [live.lane() for _ in range(lanes)]
        self._tables: dict[int, bytes] = {}  # of lanes that do not carry all
        self._left_bytes = self._left_places = 0

    def begin(self, begin: Begin) -> None:
        """A new sync begins: no more comes than it says."""
        for lane in self._lanes:
            lane.begin()
        self._left_bytes, self._left_places = begin.payload_bytes, begin.places

    def take_shares(self, payload: Tensor | None, lane: int) -> None:
        """From now on a lane carries what this table says. Raises InvalidTable."""
        table = np.zeros(0, np.uint8) if payload is None else payload.cpu().numpy()
        if (said := table.tobytes()) != self._tables.get(lane):
            specs = [share.spec for share in self._live.space.given]
            self._lanes[lane] = self._live.lane(space_of(np.frombuffer(said, np.uint8), specs))
            self._tables[lane] = said

    def read(
        self,
        bucket: Bucket,
        payload: Tensor | None,
        lane: int = 0,
        *,
        is_private: bool = False,
    ) -> Received:
        """Check a payload as it came. Nobody else can write to it if it `is_private`.

        Raises:
            WireError: A rule of the wire format is broken.
        """
        sizes = bucket.sizes
        self._left_bytes -= sizes.num_bytes
        self._left_places -= sizes.places
        if self._left_bytes < 0 or self._left_places < 0:
            raise LimitExceeded(
                "the sync is larger than its begin declared: begin must count all payloads"
            )
        place = self._lanes[lane]
        if sizes.num_bytes > place.space.most_bytes:
            raise InvalidIndices("a payload has more than all tiles of its lane")
        if payload is None:
            payload = torch.empty(0, dtype=torch.uint8, device="cpu")
        if bucket.compression == "gap":
            changes = gap.decode(payload.cpu().numpy().data, sizes, place.old)
        elif bucket.compression == "class":
            data = payload.cpu().numpy().data
            changes = codec_of(bucket.compression).decode(data, sizes, place)
        else:
            changes = Changes.of(aligned(inflated(bucket, payload)), sizes)
        received = Received(place, changes, is_private or bucket.compression != "none")
        place.check(received)
        return received


def aligned(payload: Tensor) -> Tensor:
    """The same bytes at a multiple of `ALIGNMENT`: copied if they are not."""
    return payload.clone() if payload.data_ptr() % ALIGNMENT else payload


def inflated(bucket: Bucket, payload: Tensor) -> Tensor:
    """uint8[n]: a payload as it was packed. Raises WireError."""
    if bucket.compression == "none":
        return payload
    data = inflate(payload.cpu().numpy().data, bucket.sizes.num_bytes)
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
