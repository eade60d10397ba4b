"""Ranks that compare what they hold of a model, and send it in the checkpoint's coordinates."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.apply import Staging
from deltasync.delta.batched import Kernels
from deltasync.delta.bits import Flat, WireReader
from deltasync.delta.bucket import BucketReader, buckets
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host_rows import Lines
from deltasync.delta.patch import Run
from deltasync.delta.policy import Policy
from deltasync.delta.shard import Band, ShardSpec, Share, share_out
from deltasync.delta.snapshot import Snapshot
from deltasync.sync.plan import Plan, plan_delta, plan_full
from deltasync.testing import strategies as own
from deltasync.testing.strategies import relaid, same_bits, specs_of
from deltasync.wire.digest import MASK
from deltasync.wire.messages import ParameterSpec
from deltasync.wire.table import MAX_SPARSE_SPAN
from tests.delta.shards import placements
from tests.delta.test_batched import DEVICE, few

POLICY = Policy(chunk_numel=8, dense_above=0.5)
Model = dict[str, Tensor]


def box_of(tensor: Tensor, box: ShardSpec) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))]


class Rank:
    """One of a trainer's ranks: its part of a model, its source and its snapshot."""

    def __init__(
        self,
        model: Model,
        boxes: dict[str, ShardSpec],
        layout: own.Layout,
        kernels: Kernels = "torch",
    ) -> None:
        self.model, self.boxes = model, boxes
        device = DEVICE if kernels == "triton" else "cpu"
        self.held = {
            name: relaid(box_of(model[name], box), layout).to(device) for name, box in boxes.items()
        }
        self.shares: list[Share] = []
        self.readers: list[WireReader] = []
        for number, spec in enumerate(specs_of(model)):
            if spec.name not in boxes:
                continue
            for index, band in boxes[spec.name].bands():
                self.shares.append(Share.of(number, spec, band))
                local = self.held[spec.name][index]
                self.readers.append(WireReader.of(local, spec.dtype, name=spec.name))
        self.snapshot = Snapshot(self.shares, self.readers, chunk_numel=8, kernels=kernels)

    def step(self) -> None:
        """The optimizer has changed the model."""
        for name, box in self.boxes.items():
            new = box_of(self.model[name], box).contiguous()
            Flat.of(self.held[name]).write(0, Flat.of(new).read(0, new.numel()))

    def delta(self, max_held_bytes: int, bucket_bytes: int) -> Plan:
        return plan_delta(
            self.snapshot,
            self.readers,
            policy=POLICY,
            bucket_bytes=bucket_bytes,
            max_held_bytes=max_held_bytes,
            base_version=0,
        )


class Receiver:
    """Holds the whole model."""

    def __init__(self, model: Model) -> None:
        self.live = {name: relaid(tensor, "stepped") for name, tensor in model.items()}
        self.specs = specs_of(model)
        self.ledger = DigestLedger(self.specs, chunk_numel=5)
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
    ranks = [Rank(model, boxes, layout) for boxes in shares]
    assert sum(rank.snapshot.ledger.total for rank in ranks) & MASK == receiver.ledger.total
    for is_full in (False, True, False):
        for tensor in model.values():
            new = data.draw(own.mutations(tensor))
            Flat.of(tensor).write(0, Flat.of(new).read(0, new.numel()))
        for rank in ranks:
            rank.step()
            if is_full:
                rank.snapshot.capture(rank.readers)
        plans = [
            plan_full(rank.snapshot, bucket_bytes=bucket_bytes)
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
        fresh = DigestLedger(rank.shares, chunk_numel=8)
        for number, reader in enumerate(rank.readers):
            fresh.measure(number, reader.read)
        assert (fresh.sums == rank.snapshot.ledger.sums).all()


@few
@given(
    seed=st.integers(0, 1 << 20),
    share=st.sampled_from([0.0, 0.1, 0.9]),
    max_held=st.sampled_from([0, 1 << 30]),
    bucket_bytes=st.sampled_from([256, 1 << 20]),
)
def test_kernels_compare_runs(seed: int, share: float, max_held: int, bucket_bytes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 5), "b": (40,), "c": (3, 2, 4)}
    model = {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
    receiver = Receiver(model)
    boxes = [
        {name: ShardSpec.placed(shape, (2,), (rank,), [(0, 1)]) for name, shape in shapes.items()}
        for rank in range(2)
    ]
    ranks = [Rank(model, one, "contiguous", "triton") for one in boxes]
    assert all(rank.snapshot.differ is not None for rank in ranks)
    assert sum(rank.snapshot.ledger.total for rank in ranks) & MASK == receiver.ledger.total
    for is_full in (False, True):
        for tensor in model.values():
            mask = torch.rand(tensor.shape, generator=generator) < share
            tensor[mask] = torch.randn(tensor.shape, generator=generator).bfloat16()[mask]
        plans: list[Plan] = []
        for rank in ranks:
            rank.step()
            if is_full:
                rank.snapshot.capture(rank.readers)
            full = plan_full(rank.snapshot, bucket_bytes=bucket_bytes)
            plans.append(full if is_full else rank.delta(max_held, bucket_bytes))
        digest = receiver.sync(plans, in_place=False, device=DEVICE)
        assert digest == sum(plan.ledger.total for plan in plans) & MASK
        for plan in plans:
            plan.decided()
        assert all(same_bits(receiver.live[name], tensor) for name, tensor in model.items())


@given(
    shape=st.lists(st.integers(0, 5), max_size=5).map(tuple),
    data=st.data(),
)
def test_bands_make_up_a_shard(shape: tuple[int, ...], data: st.DataObject) -> None:
    offset = [data.draw(st.integers(0, full)) for full in shape]
    size = [data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)]
    box = ShardSpec(shape, tuple(offset), tuple(size))
    local = box.positions(torch.arange(box.numel)).view(box.size)
    found = []
    for index, band in box.bands():
        here = torch.arange(band.numel)
        assert torch.equal(band.places(here), local[index].reshape(-1))
        assert [band.place(n) for n in range(band.numel)] == band.places(here).tolist()
        found.append(band.places(here))
        for start, stop in ((0, band.numel), (band.numel // 2, band.numel)):
            is_run = band.place(stop - 1) - band.place(start) == stop - 1 - start
            assert band.is_scattered(start, stop) != is_run
    assert list(chain.from_iterable(f.tolist() for f in found)) == local.reshape(-1).tolist()


@given(
    cols=st.integers(1, 3),
    gap=st.sampled_from([1, 1 << 29, 1 << 30, 1 << 31, 1 << 40]),
    picked=st.sets(st.integers(0, 11), min_size=1),
    is_dense=st.booleans(),
)
def test_indices_of_far_rows_fit_int32(
    cols: int, gap: int, picked: set[int], is_dense: bool
) -> None:
    band = Band(start=7, numel=12, cols=cols, gap=gap)
    spec = ParameterSpec(("w",), (band.place(12) + gap,), dtypes.BY_NAME["int16"])
    share = Share.of(0, spec, band)
    bits = torch.arange(12, dtype=torch.int16)
    here = torch.tensor(sorted(picked), dtype=torch.int32)
    run = Run(0, 12, None, bits) if is_dense else Run(0, 12, here, bits[here])
    expected = dict(zip(band.places(here.long()).tolist(), here.tolist(), strict=True))
    if is_dense:
        expected = {band.place(n): n for n in range(12)}
    found: dict[int, int] = {}
    reader = BucketReader((spec,))
    for bucket in buckets([(0, run)], [share], bucket_bytes=1 << 20):
        payload = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        list(bucket.write(payload, lambda _, start, stop: bits[start:stop]))
        for _, row in reader.read(payload, len(bucket.rows)):
            assert row.span <= MAX_SPARSE_SPAN
            assert row.bits is not None
            at = range(row.count) if row.indices is None else row.indices.tolist()
            found |= dict(zip((row.start + n for n in at), row.bits.tolist(), strict=True))
    assert found == expected
