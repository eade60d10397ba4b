"""What one end finds the other writes, whatever came before; nothing is lost, nor kept too long."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.bits import as_bits
from deltasync.delta.coding import Coding
from deltasync.delta.detector import HostFound
from deltasync.delta.ledger import Ledger
from deltasync.delta.shard import share_out
from deltasync.delta.snapshot import MIN_BUCKET_BYTES, Delta, Plan
from deltasync.errors import DigestMismatch, SourceChanged
from deltasync.wire.changes import TILE
from deltasync.wire.digest import MASK
from tests.delta.ends import (
    Model,
    Rank,
    Receiver,
    aborted,
    as_sent,
    copies,
    equal,
    packed,
    parts,
    sole,
)
from tests.delta.shards import placements
from tests.worlds import strategies as own
from tests.worlds.bits import specs_of

SMALL = 1 << 16
BUCKETS = st.sampled_from([MIN_BUCKET_BYTES, 20_000, SMALL, 1 << 20])
ROOM = st.sampled_from([0, 200, 50_000, 1 << 30])
CODINGS: st.SearchStrategy[Coding] = st.sampled_from(["none", "zstd", "gap"])
LARGE = st.sampled_from([(TILE,), (TILE + 1,), (3, 3000), (2, 5, 1700), (65, 4100)])
"""Of several tiles; the last one of two chunks."""
MODELS = own.models() | own.models(max_parameters=2, shapes=LARGE)
WIRE = {"float32": "bfloat16", "float64": "float32"}
"""Masters, and what is sent of them."""


def check_sync(
    receiver: Receiver,
    plans: list[Plan],
    wanted: Model,
    data: st.DataObject,
    *,
    bucket_bytes: int,
    is_elsewhere: bool,
) -> bool:
    """Stage, commit and perhaps undo what ranks send. Returns whether it was written for good."""
    before, said, in_place = copies(receiver.live), list[bool](), data.draw(st.booleans())
    staging = receiver.stage(
        plans,
        in_place=in_place,
        coding=data.draw(CODINGS),
        bucket_bytes=bucket_bytes,
        writing=lambda: said.append(bool(said) or equal(receiver.live, before)),
    )
    assert all(said)
    if not said:
        assert equal(receiver.live, before)
    assert not (is_elsewhere and said)
    assert np.array_equal(staging.ledger.sums, receiver.expected(wanted))
    assert staging.commit() == staging.ledger.total
    assert equal(receiver.live, wanted)
    assert np.array_equal(receiver.measured(), staging.ledger.sums)
    if in_place:
        with pytest.raises(DigestMismatch):
            staging.undo()
    else:
        assert not said
        if data.draw(st.booleans(), label="undo"):
            staging.undo()
            assert equal(receiver.live, before)
            assert np.array_equal(receiver.measured(), receiver.weights.ledger.sums)
            return False
    receiver.weights.ledger = staging.ledger
    return True


def changed_by(plans: list[Plan]) -> set[int]:
    """Numbers of the layout's parameters that ranks send some of."""
    deltas = [plan for plan in plans if isinstance(plan, Delta)]
    return {one.space.given[share].number for one in deltas for share in np.flatnonzero(one.counts)}


@pytest.mark.promise("All or nothing", "Staging writes nothing.")
@pytest.mark.promise("All or nothing", "A failed sync loses nothing: the next one covers both.")
@given(model=MODELS.filter(lambda model: any(t.numel() for t in model.values())), data=st.data())
def test_any_history_of_syncs_and_aborts_ends_bit_equal(model: Model, data: st.DataObject) -> None:
    """Deltas, full syncs, and aborted and undone ones, of masters that ranks hold parts of.

    The receiver may hold some of them. In place, an engine is told before the first write, and only
    then.
    """
    specs = specs_of(model)
    if data.draw(st.booleans(), label="masters"):
        wired = [WIRE.get(spec.dtype.name, spec.dtype.name) for spec in specs]
        specs = tuple(
            replace(spec, dtype=dtypes.BY_NAME[name])
            for spec, name in zip(specs, wired, strict=True)
        )
    boxes = share_out(
        data.draw(placements({name: tuple(t.shape) for name, t in model.items()})),
        {spec.name: spec.dtype.item_size for spec in specs},
        split_above=data.draw(st.sampled_from([0, 1 << 20])),
    )
    boxes = [one for one in boxes if any(box.numel for box in one.values())]
    layout = data.draw(own.LAYOUTS)
    ranks = [Rank(specs, one, copies(parts(model, one), layout)) for one in boxes]
    some = st.sets(
        st.sampled_from([n for n, t in enumerate(model.values()) if t.numel()]), min_size=1
    )
    receiver = Receiver(
        as_sent(model, specs),
        layout=data.draw(own.LAYOUTS),
        held=data.draw(st.none() | some, label="held"),
    )
    kinds = st.sampled_from(["delta", "full"]) | st.integers(0, 6)
    for kind in [*data.draw(st.lists(kinds, max_size=3), label="syncs"), "delta"]:
        model = {name: data.draw(own.mutations(tensor)) for name, tensor in model.items()}
        room, bucket_bytes = data.draw(ROOM), data.draw(BUCKETS)
        for rank, one in zip(ranks, boxes, strict=True):
            rank.write(parts(model, one))
            if kind == "full":
                rank.snapshot.capture(rank.readers)
        if isinstance(kind, int):
            for rank in ranks:
                aborted(rank.delta(room, bucket_bytes), kind)
            continue
        plans: list[Plan] = [
            rank.snapshot.full(bucket_bytes=bucket_bytes)
            if kind == "full"
            else rank.delta(room, bucket_bytes)
            for rank in ranks
        ]
        sent = as_sent(model, specs)
        wanted = {
            name: sent[name] if number in receiver.held else receiver.live[name].clone()
            for number, name in enumerate(model)
        }
        is_final = check_sync(
            receiver,
            plans,
            wanted,
            data,
            bucket_bytes=bucket_bytes,
            is_elsewhere=kind == "delta" and not {*receiver.held} & changed_by(plans),
        )
        if len(receiver.held) == len(model):
            total = sum(plan.ledger.total for plan in plans) & MASK
            assert total == int(receiver.expected(wanted).sum()) & MASK
        for rank, plan in zip(ranks, plans, strict=True):
            assert isinstance(plan.ledger, Ledger)
            assert np.array_equal(plan.ledger.sums, rank.measured())
            if is_final or kind == "full":
                plan.decided()
        if not is_final and kind == "full":  # receivers are brought there by the next full sync
            assert receiver.sync([rank.snapshot.full(bucket_bytes=1 << 20) for rank in ranks])
    for rank in ranks if is_final else ():
        assert np.array_equal(rank.measured(), rank.snapshot.ledger.sums)
        assert not rank.delta().nnz


@given(model=MODELS, data=st.data())
def test_what_a_plan_says_is_what_differs(model: Model, data: st.DataObject) -> None:
    """A tile goes whole exactly where places and values would take more, or it was ahead."""
    sender, before = sole(model), copies(model)
    new = {name: data.draw(own.mutations(tensor)) for name, tensor in model.items()}
    sender.write(new)
    plan = sender.delta(data.draw(ROOM), data.draw(BUCKETS))
    masks = [(as_bits(new[name]) != as_bits(old)).reshape(-1) for name, old in before.items()]
    counts = [int(mask.sum()) for mask in masks]
    assert plan.nnz == sum(counts)
    assert plan.counts.tolist() == [counts[share.number] for share in plan.space.given]
    expected = list[tuple[int, int, int]]()
    for number in (share.number for share in plan.space.shares):
        size = before[list(before)[number]].element_size()
        for tile in torch.split(masks[number], TILE) if counts[number] else ():
            count = int(tile.sum())
            is_whole = count * (2 + size) > len(tile) * size
            expected += [(0 if is_whole else count, len(tile) * size, size)] if count else []
    sizes = [bucket.sizes for bucket in plan.buckets()]
    assert sum(one.tiles for one in sizes) == len(expected)
    assert plan.places == sum(one.places for one in sizes) == sum(n for n, _, _ in expected)
    whole = sum(-(-num_bytes // 16) * 16 for n, num_bytes, _ in expected if not n)
    assert sum(one.whole * one.item_size for one in sizes) == whole
    assert plan.payload_bytes == sum(one.num_bytes for one in sizes)
    dense = sum(t.nbytes for t in model.values())
    assert plan.payload_bytes <= dense + len(plan.space) * (6 + 5 * 16)


def test_a_tile_that_takes_as_much_both_ways_is_sparse() -> None:
    sender = sole({"w": torch.zeros(8, dtype=torch.int16)})
    sender.held["w"][::2] = 1
    assert sender.delta().places == 4


# Memory, and what is sent again


def changed_ends() -> tuple[Rank, Model]:
    """Three parameters; of the first two, one element in ten was changed."""
    model = {f"w{n}": torch.zeros(20 * TILE, dtype=torch.int16) for n in range(3)}
    sender = sole(model)
    sender.held["w0"][::10] = 1
    sender.held["w1"][::10] = 2
    return sender, model


@pytest.mark.promise(
    "Cost",
    "Runs that are not held before the decision are read from the source, and sent again "
    "after an abort.",
)
@pytest.mark.parametrize("room", [0, 50_000, 1 << 30])
def test_what_was_written_ahead_is_sent_again_after_an_abort(room: int) -> None:
    """Whole tiles, and no others."""
    sender, model = changed_ends()
    sender.held["w2"].fill_(3)
    receiver, first = Receiver(model), sender.delta(room, SMALL)
    aborted(first, 1 << 20)
    sizes = [bucket.sizes for bucket in first.buckets()]
    ends = accumulate(one.num_bytes for one in sizes)
    held = sum(one.tiles for one, end in zip(sizes, ends, strict=True) if end <= room)
    sender.held["w1"].zero_()  # back to what receivers hold
    plan = sender.delta(room, SMALL)
    tiles = sum(bucket.sizes.tiles for bucket in plan.buckets())
    assert tiles == 40 + 40 - min(40, max(held, 20))  # all of w0 and w2, and of w1 what is ahead
    assert receiver.sync([plan]) == plan.ledger.total
    plan.decided()
    assert equal(receiver.live, sender.held)
    assert not sender.delta().nnz
    assert not list(sender.delta().buckets())


def test_a_source_that_changes_while_it_is_sent_is_an_error_and_loses_nothing() -> None:
    sender, model = changed_ends()
    plan = sender.delta(0)
    sender.held["w0"][5] = 7
    with pytest.raises(SourceChanged, match="while it was sent"):
        aborted(plan, 1)
    receiver, again = Receiver(model), sender.delta()
    assert receiver.sync([again]) == again.ledger.total
    assert equal(receiver.live, sender.held)


class Stop(BaseException):
    """What no code expects: as if somebody had pressed Ctrl-C."""


@pytest.mark.parametrize("broken", ["emit", "advance", "advance_whole", "advance_lanes"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_snapshot_that_is_ahead_when_packing_breaks_off_is_known_to_be(
    broken: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, model = changed_ends()
    sender.held["w2"].fill_(3)
    snapshot = sender.snapshot
    of = HostFound if broken == "emit" else snapshot
    inner = getattr(of, broken)

    def stopping(*args: object, **options: object) -> None:
        if is_late:
            inner(*args, **options)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(of, broken, stopping)
        with pytest.raises(Stop):
            aborted(sender.delta(0, SMALL), 1)
    receiver, plan = Receiver(model), sender.delta()
    assert receiver.sync([plan]) == plan.ledger.total
    plan.decided()
    assert equal(receiver.live, sender.held)
    assert np.array_equal(snapshot.ledger.sums, sender.measured())


def test_padding_is_zero() -> None:
    model = {"a": torch.zeros(5, dtype=torch.int16), "b": torch.zeros(9, dtype=torch.int16)}
    sender = sole(model)
    sender.held["a"].fill_(-1)
    sender.held["b"][7] = -1
    [bucket] = sender.delta().buckets()
    payload, _ = packed(bucket)
    columns = [8, 4, 2, 2, 10]
    assert [begin for begin, _ in bucket.sizes.columns] == [0, 16, 32, 48, 64]
    for n, length in enumerate(columns):
        assert not payload[16 * n + length : 16 * n + 16].any()
    assert int((payload[64:] == 255).sum()) == 10
