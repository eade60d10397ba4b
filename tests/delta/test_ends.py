"""What one end finds the other writes, on torch's operations and on kernels; nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync import dtypes
from deltasync.delta.snapshot import Kernels, Plan
from deltasync.delta.batched.backend import BatchedBackend
from deltasync.delta.bits import as_bits
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host import backend, small
from deltasync.delta.host.backend import DeltaPlan, HostBackend
from deltasync.delta.policy import Policy
from deltasync.delta.shard import ShardSpec, share_out
from deltasync.errors import DigestMismatch
from deltasync.wire.digest import MASK
from tests.delta.ends import (
    DEVICE,
    Model,
    Rank,
    Receiver,
    aborted,
    as_sent,
    copies,
    equal,
    parts,
    sole,
)
from tests.delta.shards import placements
from tests.worlds import strategies as own
from tests.worlds.bits import specs_of

few = settings(max_examples=10 if DEVICE.type == "cpu" else 200)
sizes = st.integers(256, 270) | st.sampled_from([700, 1 << 20])
room = st.sampled_from([0, 60, 1 << 30])
models = own.models().filter(lambda model: any(t.numel() for t in model.values()))


WIRE = {"float32": "bfloat16", "float64": "float32"}
"""Masters, and what is sent of them."""
POLICIES = [
    Policy(chunk_numel=numel, dense_above=share) for numel, share in ((8, 0.5), (5, 0.0), (16, 1.0))
]


@contextmanager
def side_by_side(most: int, together: int) -> Iterator[None]:
    """Parameters of up to so many elements are compared together, however few there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_MANY", 0)
        patch.setattr(small, "SMALL", most)
        patch.setattr(small, "_TOGETHER", together)
        yield


def check_sync(
    receiver: Receiver,
    plans: list[Plan],
    wanted: Model,
    data: st.DataObject,
    *,
    bucket_bytes: int,
    may_undo: bool,
    is_elsewhere: bool,
) -> bool:
    """Stage, commit and perhaps undo what ranks send. Returns whether it was written for good."""
    before, said, in_place = copies(receiver.live), list[bool](), data.draw(st.booleans())
    staging = receiver.stage(
        plans,
        in_place=in_place,
        bucket_bytes=bucket_bytes,
        writing=lambda: said.append(bool(said) or equal(receiver.live, before)),
    )
    assert all(said)
    if not said:
        assert equal(receiver.live, before)
    if is_elsewhere and receiver.kernels == "torch":
        assert not said
    assert np.array_equal(staging.ledger.sums, receiver.expected(wanted))
    assert staging.commit() == staging.ledger.total
    assert equal(receiver.live, wanted)
    if in_place:
        with pytest.raises(DigestMismatch):
            staging.undo()
    else:
        assert not said
        if may_undo and data.draw(st.booleans(), label="undo"):
            staging.undo()
            assert equal(receiver.live, before)
            assert np.array_equal(receiver.measured(), receiver.backend.ledger.sums)
            return False
    receiver.backend.ledger = staging.ledger
    return True


def changed_by(plans: list[Plan]) -> set[int]:
    """Numbers of the layout's parameters that ranks send some of."""
    deltas = [plan for plan in plans if isinstance(plan, DeltaPlan)]
    return {number for one in deltas for number in one.ledger.numbers[one.changed].tolist()}


def check_history(model: Model, data: st.DataObject, kernels: Kernels) -> None:
    """Deltas, full syncs, and aborted and undone ones, of masters that ranks hold parts of.

    Both ends cut parameters into different chunks; the receiver may hold some of them.
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
    layout, policy = data.draw(own.LAYOUTS), data.draw(st.sampled_from(POLICIES))
    ranks = [Rank(specs, one, copies(parts(model, one), layout), kernels, policy) for one in boxes]
    some = st.sets(
        st.sampled_from([n for n, t in enumerate(model.values()) if t.numel()]), min_size=1
    )
    receiver = Receiver(
        as_sent(model, specs),
        kernels,
        chunk_numel=data.draw(st.sampled_from([1, 5, 16, 1000])),
        layout=data.draw(own.LAYOUTS),
        held=data.draw(st.none() | some, label="held"),
    )
    assert np.array_equal(receiver.measured(), receiver.backend.ledger.sums)
    kinds = st.sampled_from(["delta", "full"]) | st.integers(0, 6)
    for kind in [*data.draw(st.lists(kinds, max_size=3), label="syncs"), "delta"]:
        model = {name: data.draw(own.mutations(tensor)) for name, tensor in model.items()}
        other, limits = data.draw(st.sampled_from(POLICIES)), (data.draw(room), data.draw(sizes))
        for rank, one in zip(ranks, boxes, strict=True):
            rank.write(parts(model, one))
            if kind == "full":
                rank.snapshot.capture(rank.readers)
        if isinstance(kind, int):
            for rank in ranks:
                aborted(rank.delta(*limits, policy=other), kind)
            continue
        plans = [
            rank.snapshot.full(bucket_bytes=limits[1])
            if kind == "full"
            else rank.delta(*limits, policy=other)
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
            bucket_bytes=limits[1],
            may_undo=kind != "full",
            is_elsewhere=kind == "delta" and not {*receiver.held} & changed_by(plans),
        )
        if len(receiver.held) == len(model):
            total = sum(plan.ledger.total for plan in plans) & MASK
            assert total == int(receiver.expected(wanted).sum()) & MASK
        for rank, plan in zip(ranks, plans, strict=True):
            assert isinstance(plan.ledger, DigestLedger)
            assert np.array_equal(plan.ledger.sums, rank.measured())
            if is_final:
                plan.decided()
    for rank in ranks if is_final else ():
        assert np.array_equal(rank.measured(), rank.snapshot.ledger.sums)
        assert not rank.delta().nnz


@pytest.mark.promise("All or nothing", "Staging writes nothing.")
@pytest.mark.promise("All or nothing", "A failed sync loses nothing: the next one covers both.")
@given(model=models, data=st.data())
def test_any_history_of_syncs_and_aborts_ends_bit_equal(model: Model, data: st.DataObject) -> None:
    """In place, an engine is told before the first write, and only then."""
    with ExitStack() as stack:
        if data.draw(st.booleans(), label="small ones side by side"):
            most, together = data.draw(
                st.sampled_from([(8, 50), (1 << 12, 50), (1 << 12, 1 << 15)])
            )
            stack.enter_context(side_by_side(most, together))
        check_history(model, data, "torch")


@few
@given(model=models, data=st.data())
def test_any_history_on_kernels_ends_bit_equal(model: Model, data: st.DataObject) -> None:
    check_history(model, data, "triton")


@st.composite
def far_boxes(draw: st.DrawFn) -> ShardSpec:
    """At most 100 elements of a tensor that may be larger than any memory, but has strides."""
    rests = st.sampled_from([0, 1, 2, 1 << 20, 1 << 30, 1 << 31])
    dims = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), rests), max_size=4).filter(
            lambda dims: np.prod([float(max(1, sum(dim))) for dim in dims]) < 1 << 62
        )
    )
    offset, size = (tuple(one[n] for one in dims) for n in (0, 1))
    if np.prod(size) > 100:
        return ShardSpec((20, 8), (0, 2), (20, 4))
    return ShardSpec(tuple(map(sum, dims)), offset, size)


@few
@given(
    boxes=st.lists(far_boxes(), min_size=1, max_size=3),
    data=st.data(),
    chunk_numel=st.sampled_from([4, 80]),
    max_held=room,
)
def test_kernels_find_what_torch_finds(
    boxes: list[ShardSpec], data: st.DataObject, chunk_numel: int, max_held: int
) -> None:
    """The same elements, sparse and dense, however large the tensors are of which they are."""
    drawn = [data.draw(own.tensors(shapes=st.just(box.size))) for box in boxes]
    model = {f"{number}": tensor for number, tensor in enumerate(drawn)}
    specs = [
        replace(spec, shape=box.shape) for spec, box in zip(specs_of(model), boxes, strict=True)
    ]
    held = dict(zip(model, boxes, strict=True))
    policy = Policy(chunk_numel=chunk_numel, dense_above=0.4)
    both: list[Kernels] = ["torch", "triton"]
    ranks = [Rank(specs, held, model, kernels, policy) for kernels in both]
    assert [type(rank.snapshot) for rank in ranks] == [HostBackend, BatchedBackend]
    new = {name: data.draw(own.mutations(tensor)) for name, tensor in model.items()}
    for rank in ranks:
        rank.write(new)
    plans = [rank.delta(max_held, 512) for rank in ranks]
    plain, batched = ((p.sparse_bytes, p.dense_bytes, p.nnz, p.changed.tolist()) for p in plans)
    assert plain == batched
    for rank, plan in zip(ranks, plans, strict=True):
        aborted(plan, 1 << 20)
        assert isinstance(plan.ledger, DigestLedger)
        assert np.array_equal(plan.ledger.sums, rank.measured())
        plan.decided()
        assert np.array_equal(rank.snapshot.ledger.sums, rank.measured())
        assert not rank.delta().nnz


# Memory, and what is sent again


def changed_ends() -> tuple[Rank, Model]:
    """Three parameters; of the first two, one element in ten was changed."""
    model = {f"w{n}": torch.zeros(100, dtype=torch.int16) for n in range(3)}
    sender = sole(model)
    sender.held["w0"][::10] = 1
    sender.held["w1"][::10] = 2
    return sender, model


@pytest.mark.promise(
    "Cost",
    "Memory beyond weights and snapshot stays within the bounds of the options.",
)
def test_held_bytes_are_bounded_and_the_rest_is_found_again() -> None:
    sender, _ = changed_ends()
    whole = sender.delta(1 << 30)
    assert (whole.held_bytes, whole.sparse_bytes, whole.nnz) == (120, 120, 20)
    delta = sender.delta(119)
    assert (delta.held_bytes, delta.sparse_bytes, delta.nnz) == (60, 120, 20)
    assert delta.ledger.total == whole.ledger.total


@pytest.mark.promise(
    "Cost",
    "Runs that are not held before the decision are read from the source, and sent again "
    "after an abort.",
)
@pytest.mark.parametrize("max_held", [60, 1 << 30])
@pytest.mark.parametrize("together", [False, True])
def test_what_was_written_ahead_is_sent_again_after_an_abort(max_held: int, together: bool) -> None:
    """Whole parameters, and no others: w0 is held, and w1 only with more room, or if dense."""
    with side_by_side(1 << 12, 1 << 15) if together else nullcontext():
        sender, model = changed_ends()
        sender.held["w2"].fill_(3)
        receiver = Receiver(model)
        aborted(sender.delta(max_held), 1 << 20)
        sender.held["w1"].zero_()  # back to what receivers hold
        plan = sender.delta(max_held)
        assert isinstance(plan, DeltaPlan)
        ahead = [change.parameter for change in plan.changes if change.dense_bytes]
        assert ahead == ([1, 2] if max_held == 60 else [2])
        assert receiver.sync([plan]) == plan.ledger.total
        plan.decided()
    assert equal(receiver.live, sender.held)
    assert as_bits(receiver.live["w0"]).sum() == 10
