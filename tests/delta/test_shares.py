"""Ranks that compare what they hold of a model, and send it in the checkpoint's coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from deltasync.delta.backend import Delta, Kernels, Plan, snapshot_of
from deltasync.delta.batched.backend import BatchedBackend
from deltasync.delta.bits import Flat
from deltasync.delta.bucket import BucketReader
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import HostBackend
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import ShardSpec, Share, rows_of, share_out, whole
from deltasync.testing.bits import specs_of
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import MAX_SPARSE_SPAN, ROW
from tests.delta.shards import placements, positions_of
from tests.delta.test_batched import DEVICE, few
from tests.worlds import strategies as own
from tests.worlds.strategies import relaid, same_bits

POLICY = Policy(chunk_numel=8, dense_above=0.5)
Model = dict[str, Tensor]


def box_of(tensor: Tensor, box: ShardSpec) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))]


class Rank:
    """One of a trainer's ranks: what it holds of a model, and its snapshot."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        boxes: dict[str, ShardSpec],
        held: Model,
        kernels: Kernels = "torch",
        policy: Policy = POLICY,
    ) -> None:
        device = DEVICE if kernels == "triton" else "cpu"
        self.policy, self.held = policy, {name: held[name].to(device) for name in boxes}
        self.shares: list[Share] = []
        self.readers: list[WireReader] = []
        for number, spec in enumerate(specs):
            if spec.name not in boxes:
                continue
            for index, region in rows_of(boxes[spec.name]):
                self.shares.append(Share(number, spec, region))
                local = self.held[spec.name][index]
                self.readers.append(WireReader.of(local, spec.dtype, name=spec.name))
        chunk_numel = policy.chunk_numel_on("cpu")
        self.snapshot = snapshot_of(
            self.shares, self.readers, chunk_numel=chunk_numel, kernels=kernels
        )

    def write(self, held: Model) -> None:
        """The optimizer has changed what this rank holds."""
        for name, tensor in self.held.items():
            Flat.of(tensor).write(0, Flat.of(held[name].contiguous()).read(0, tensor.numel()))

    def delta(self, max_held_bytes: int, bucket_bytes: int) -> Delta:
        return self.snapshot.compare(
            self.readers,
            policy=self.policy,
            bucket_bytes=bucket_bytes,
            max_held_bytes=max_held_bytes,
            base_version=0,
        )

    def measured(self) -> NDArray[np.uint64]:
        """Digests of what is held, from scratch."""
        fresh = DigestLedger(self.shares, chunk_numel=self.policy.chunk_numel_on("cpu"))
        for number, reader in enumerate(self.readers):
            fresh.measure(number, reader.read)
        return fresh.sums

    def elements(self) -> dict[tuple[int, int], int]:
        """Bits by (parameter, position)."""
        found: dict[tuple[int, int], int] = {}
        for share, reader in zip(self.shares, self.readers, strict=True):
            places = share.region.places(torch.arange(share.numel)).tolist()
            bits = reader.read(0, share.numel).tolist()
            found |= {(share.number, n): b for n, b in zip(places, bits, strict=True)}
        return found


def parts(model: Model, boxes: dict[str, ShardSpec]) -> Model:
    return {name: box_of(model[name], box) for name, box in boxes.items()}


def copies(model: Model, layout: own.Layout = "contiguous") -> Model:
    return {name: relaid(tensor, layout) for name, tensor in model.items()}


class Receiver:
    """Holds the whole model."""

    def __init__(self, model: Model) -> None:
        self.live = {name: relaid(tensor, "stepped") for name, tensor in model.items()}
        self.specs = specs_of(model)
        self.ledger = DigestLedger(whole(self.specs), chunk_numel=5)
        for number, tensor in enumerate(self.live.values()):
            self.ledger.measure(number, Flat.of(tensor).read)

    def sync(self, plans: list[Plan], *, in_place: bool, device: torch.device | None = None) -> int:
        """Write what ranks send. Returns the digest of what was read back."""
        flats = {n: Flat.of(tensor) for n, tensor in enumerate(self.live.values())}
        room = sum(plan.sparse_bytes + plan.dense_bytes for plan in plans)
        staging = Staging(Lines(flats, len(flats)), self.ledger, in_place=in_place)
        sent = 0
        for plan in plans:
            reader = BucketReader(self.specs)
            for bucket in plan.buckets():
                payload = torch.full((bucket.num_bytes,), 0xEE, dtype=torch.uint8, device=device)
                bucket.write(payload)
                opened = reader.open(payload.cpu(), bucket.num_rows)
                sent += int((opened.rows["index_bytes"] + opened.rows["value_bytes"]).sum())
                staging.stage_bucket(opened)
        assert sent <= room
        digest = staging.commit()
        self.ledger = staging.ledger
        return digest


@given(
    model=own.models(),
    data=st.data(),
    layout=own.LAYOUTS,
    max_held=st.sampled_from([0, 100, 1 << 30]),
    bucket_bytes=st.sampled_from([256, 1 << 20]),
    in_place=st.booleans(),
)
def test_what_ranks_send_adds_up_to_the_model(
    model: Model,
    data: st.DataObject,
    layout: own.Layout,
    max_held: int,
    bucket_bytes: int,
    in_place: bool,
) -> None:
    shares = share_out(
        data.draw(placements({name: tuple(t.shape) for name, t in model.items()})),
        {spec.name: spec.dtype.item_size for spec in specs_of(model)},
        split_above=data.draw(st.sampled_from([0, 1 << 20])),
    )
    receiver = Receiver(model)
    ranks = [Rank(specs_of(model), boxes, copies(parts(model, boxes), layout)) for boxes in shares]
    assert sum(rank.snapshot.ledger.total for rank in ranks) & MASK == receiver.ledger.total
    for is_full in (False, True, False):
        for tensor in model.values():
            new = data.draw(own.mutations(tensor))
            Flat.of(tensor).write(0, Flat.of(new).read(0, new.numel()))
        for rank, boxes in zip(ranks, shares, strict=True):
            rank.write(parts(model, boxes))
            if is_full:
                rank.snapshot.capture(rank.readers)
        plans = [
            rank.snapshot.full(bucket_bytes=bucket_bytes)
            if is_full
            else rank.delta(max_held, bucket_bytes)
            for rank in ranks
        ]
        digest = receiver.sync(plans, in_place=in_place)
        assert digest == sum(plan.ledger.total for plan in plans) & MASK
        for plan in plans:
            plan.decided()
        for name, tensor in model.items():
            assert same_bits(receiver.live[name], tensor), name
    for rank in ranks:
        assert np.array_equal(rank.measured(), rank.snapshot.ledger.sums)


@few
@given(
    data=st.data(),
    seed=own.SEEDS,
    share=st.sampled_from([0.0, 0.1, 0.9]),
    max_held=st.sampled_from([0, 1 << 30]),
    bucket_bytes=st.sampled_from([256, 1 << 20]),
)
def test_kernels_compare_shards(
    data: st.DataObject, seed: int, share: float, max_held: int, bucket_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 5), "b": (40,), "c": (3, 2, 4)}
    model = {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
    receiver = Receiver(model)
    shares = [
        one for one in share_out(data.draw(placements(shapes)), dict.fromkeys(shapes, 2)) if one
    ]
    ranks = [
        Rank(specs_of(model), boxes, copies(parts(model, boxes)), "triton") for boxes in shares
    ]
    assert all(isinstance(rank.snapshot, BatchedBackend) for rank in ranks)
    assert sum(rank.snapshot.ledger.total for rank in ranks) & MASK == receiver.ledger.total
    for is_full in (False, True):
        for tensor in model.values():
            mask = torch.rand(tensor.shape, generator=generator) < share
            tensor[mask] = torch.randn(tensor.shape, generator=generator).bfloat16()[mask]
        plans: list[Plan] = []
        for rank, boxes in zip(ranks, shares, strict=True):
            rank.write(parts(model, boxes))
            if is_full:
                rank.snapshot.capture(rank.readers)
            full = rank.snapshot.full(bucket_bytes=bucket_bytes)
            plans.append(full if is_full else rank.delta(max_held, bucket_bytes))
        digest = receiver.sync(plans, in_place=False, device=DEVICE)
        assert digest == sum(plan.ledger.total for plan in plans) & MASK
        for plan in plans:
            plan.decided()
        assert all(same_bits(receiver.live[name], tensor) for name, tensor in model.items())


@st.composite
def far_boxes(draw: st.DrawFn, least: int = 1) -> ShardSpec:
    """Few elements of a tensor that may be larger than any memory, but has strides."""
    rests = st.sampled_from([0, 1, 2, 1 << 20, 1 << 30, 1 << 31])
    dim = st.tuples(st.integers(0, 3), st.integers(least, 5), rests)
    dims = draw(st.lists(dim, max_size=4).filter(_has_strides))
    offset, size = (tuple(one[n] for one in dims) for n in (0, 1))
    return ShardSpec(tuple(map(sum, dims)), offset, size)


def _has_strides(dims: list[tuple[int, int, int]]) -> bool:
    return prod(max(1, sum(dim)) for dim in dims) <= 1 << 62


@given(box=far_boxes(least=0))
def test_regions_make_up_a_shard(box: ShardSpec) -> None:
    local = positions_of(box, torch.arange(box.numel)).view(box.size)
    found = []
    for index, region in rows_of(box):
        here = torch.arange(region.numel)
        assert torch.equal(region.places(here), local[index].reshape(-1))
        assert [region.place(n) for n in range(region.numel)] == region.places(here).tolist()
        assert region.is_run or region.place(region.numel - 1) - region.start < MAX_SPARSE_SPAN
        found.append(region.places(here))
        for start, stop in ((0, region.numel), (region.numel // 2, region.numel)):
            places = region.places(torch.arange(start, stop))
            is_run = bool((places.diff() == 1).all())
            assert region.is_scattered(start, stop) != is_run
    assert list(chain.from_iterable(f.tolist() for f in found)) == local.reshape(-1).tolist()


def opened(
    plan: Plan, specs: Sequence[ParameterSpec], bucket_bytes: int
) -> dict[tuple[int, int], int]:
    """What is sent: bits by (parameter, position)."""
    found: dict[tuple[int, int], int] = {}
    reader, sent = BucketReader(tuple(specs)), 0
    for bucket in plan.buckets():
        assert bucket.num_bytes <= bucket_bytes
        payload = torch.full((bucket.num_bytes,), 0xEE, dtype=torch.uint8)
        bucket.write(payload)
        read = reader.open(payload, bucket.num_rows)
        blocks = [
            *zip(read.index_at.tolist(), read.rows["index_bytes"].tolist(), strict=True),
            *zip(read.value_at.tolist(), read.rows["value_bytes"].tolist(), strict=True),
        ]
        sent += sum(length for _, length in blocks)
        for number, run in read.runs():
            at = list(range(run.count)) if run.indices is None else run.indices.tolist()
            assert at == sorted(set(at))
            assert 0 <= at[0] <= at[-1] < run.span
            assert run.bits is not None
            bits = run.bits.tolist()
            found |= {(number, run.start + n): b for n, b in zip(at, bits, strict=True)}
        for begin, length in blocks:
            payload[begin : begin + length] = 0
        assert not payload[bucket.num_rows * ROW.itemsize :].any()  # padding
    assert sent <= plan.sparse_bytes + plan.dense_bytes
    return found


@few
@given(
    boxes=st.just([ShardSpec((20, 8), (0, 2), (20, 4))])
    | st.lists(far_boxes().filter(lambda box: box.numel <= 100), min_size=1, max_size=3),
    data=st.data(),
    layout=own.LAYOUTS,
    chunk_numel=st.sampled_from([4, 80]),
    decide=st.lists(st.booleans(), max_size=2),
    max_held=st.sampled_from([0, 100, 1 << 30]),
    bucket_bytes=st.sampled_from([512, 1 << 20]),
)
def test_kernels_send_what_torch_sends(
    boxes: list[ShardSpec],
    data: st.DataObject,
    layout: own.Layout,
    chunk_numel: int,
    decide: list[bool],
    max_held: int,
    bucket_bytes: int,
) -> None:
    """The same elements with indices and without; rows may begin and end elsewhere."""
    drawn = [data.draw(own.tensors(shapes=st.just(box.size))) for box in boxes]
    model = {f"{number}": tensor for number, tensor in enumerate(drawn)}
    specs = [
        ParameterSpec(spec.names, box.shape, spec.dtype)
        for spec, box in zip(specs_of(model), boxes, strict=True)
    ]
    held = dict(zip(model, boxes, strict=True))
    policy = Policy(chunk_numel=chunk_numel, dense_above=0.4)
    both: list[Kernels] = ["torch", "triton"]
    ranks = [Rank(specs, held, copies(model, layout), kernels, policy) for kernels in both]
    assert [type(rank.snapshot) for rank in ranks] == [HostBackend, BatchedBackend]
    replicas = [rank.elements() for rank in ranks]
    is_ahead = False
    for is_decided in [*decide, True]:
        model = {name: data.draw(own.mutations(tensor)) for name, tensor in model.items()}
        for rank in ranks:
            rank.write(model)
        plain, batched = plans = [rank.delta(max_held, bucket_bytes) for rank in ranks]
        sent = [opened(plan, specs, bucket_bytes) for plan in plans]
        for plan in plans:
            assert isinstance(plan.ledger, DigestLedger)
            assert np.array_equal(plan.ledger.sums, ranks[0].measured())
        if not is_ahead:
            assert sent[0] == sent[1]
            assert (plain.sparse_bytes, plain.dense_bytes, plain.nnz) == (
                *(batched.sparse_bytes, batched.dense_bytes, batched.nnz),
            )
            assert plain.changed.tolist() == batched.changed.tolist()
        is_ahead = not is_decided
        for rank, plan, replica, found in zip(ranks, plans, replicas, sent, strict=True):
            assert found.items() <= rank.elements().items()
            if is_decided:
                plan.decided()
                replica |= found
    for rank, replica in zip(ranks, replicas, strict=True):
        assert replica == rank.elements()
        full = rank.snapshot.full(bucket_bytes=bucket_bytes)
        assert opened(full, specs, bucket_bytes) == replica


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("changed", [[0, 2], [0, 1, 3], [1, 3]])
def test_dense_chunks_of_columns_with_others_between_them(
    kernels: Kernels, changed: list[int]
) -> None:
    model = {"a": torch.randn(16, 6).bfloat16()}
    boxes = [{"a": ShardSpec((16, 6), (0, begin), (16, 3))} for begin in (0, 3)]
    receiver = Receiver(model)
    ranks = [Rank(specs_of(model), box, copies(parts(model, box)), kernels) for box in boxes]
    held = parts(model, boxes[0])["a"].reshape(-1).clone()
    for chunk in changed:  # of eight elements
        held[8 * chunk : 8 * chunk + 8] += 1
    model["a"][:, :3] = held.view(16, 3)
    for rank, box in zip(ranks, boxes, strict=True):
        rank.write(parts(model, box))
    plans: list[Plan] = [rank.delta(1 << 30, 1 << 20) for rank in ranks]
    receiver.sync(plans, in_place=False, device=DEVICE)
    assert same_bits(receiver.live["a"], model["a"])
