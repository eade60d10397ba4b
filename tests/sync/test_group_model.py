"""What rank 0 knows of the others: data and arithmetic, of which no link is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

from deltasync import NamedTensor, dtypes
from deltasync.errors import SyncAborted
from deltasync.sync.group import model, orders
from deltasync.sync.protocol.frames import SentBuckets
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec
from tests.delta.shards import placements
from tests.worlds.trainers import Boxes

SHAPES = {"a": (6, 4), "b": (5,), "c": (2, 3, 2)}
SPECS = tuple(
    ParameterSpec((name,), shape, dtypes.BY_NAME["float32"]) for name, shape in SHAPES.items()
)


class Held:
    """Digests of a model in which parameter n has the digest `seed + n`."""

    def __init__(self, seed: int) -> None:
        self.sums = np.array([seed + number for number in range(len(SPECS))], np.uint64)

    @property
    def total(self) -> int:
        return self.digest_of(None)

    def digest_of(self, copies: NDArray[np.uint64] | None) -> int:
        return int(self.sums.sum() if copies is None else (self.sums * copies).sum())


def state(digests: tuple[str, ...]) -> orders.SnapshotState:
    return orders.SnapshotState(digests=digests, sparse_bytes=0, dense_bytes=1, snapshot_bytes=2)


@given(boxes=placements(SHAPES))
def test_each_rank_learns_its_share_from_the_order_to_all(boxes: list[Boxes]) -> None:
    declared = [
        model.Declaration.of(
            [NamedTensor((name,), torch.zeros(box.size), box) for name, box in held.items()]
        )
        for held in boxes
    ]
    own, order = model.capture_order(declared, SPECS, call=1, name="0" * 32)
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in SHAPES.items()}
    for rank, declaration in enumerate(declared):
        specs, share = model.share_of_rank(order, rank, declaration)
        assert specs == SPECS
        assert rank or share == own
        for name, box in share.items():
            ends = zip(box.offset, box.size, strict=True)
            counts[name][tuple(slice(start, start + size) for start, size in ends)] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


def test_digests_add_up_and_none_is_known_that_was_not_asked_for() -> None:
    copies = np.array([2, 0, 1], np.uint64)
    others = model.OtherRanks()
    asked = others.asked_with([None, copies, copies.copy()])
    assert len(asked) == 2
    ranks = [Held(10), Held(MASK - 100)]
    told = [model.digests_told(held, model.runs_of(asked)) for held in ranks]
    others.hold(asked, dict(enumerate(map(state, told), start=1)))
    assert len(others.asked_with([copies])) == 2
    known = model.GroupDigests(Held(5), others.digests)
    for kind in asked:
        assert known.digest_of(kind) == sum(h.digest_of(kind) for h in [Held(5), *ranks]) & MASK
    with pytest.raises(SyncAborted, match="no digest of this kind"):
        known.digest_of(np.array([1, 1, 0], np.uint64))


def test_receivers_that_one_rank_has_lost_leave_nothing_to_compare() -> None:
    others = model.OtherRanks()

    def sent(lost: dict[str, str]) -> orders.Sent:
        return orders.Sent(digests=("0" * 15 + "3",), buckets=SentBuckets(1, 7, 7, lost))

    good = others.have_sent({1: sent({}), 2: sent({})})
    assert (good.num_buckets, good.payload_bytes, good.bucket_bytes, good.lost) == (2, 14, 7, {})
    assert model.GroupDigests(Held(5), others.sent).total == 18 + 6
    bad = others.have_sent({1: sent({}), 2: sent({"f" * 32: "gone"})})
    assert bad.lost == {"f" * 32: "rank 2 of the trainer: gone"}
    assert others.sent == {}
