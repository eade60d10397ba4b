"""Kernels over tiles do what hosts do: the same payloads, digests and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, Live, as_bits, torch_dtype
from deltasync.delta.changes import Changes
from deltasync.delta.choice import Kernels, device_for, snapshot_of
from deltasync.delta.live import DeviceTally
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.region import Region
from deltasync.delta.shard import Share, whole
from deltasync.delta.snapshot import Delta, Plan, Snapshot
from deltasync.delta.staging import Lane, LiveWeights, Received, Staging, staged_bytes_of
from deltasync.delta.tiles import Space
from deltasync.engines.routes.codes import Codes
from deltasync.engines.routes.route import Part, Piece
from deltasync.errors import ConfigError, DigestMismatch, InvalidIndices
from deltasync.wire.changes import Sizes
from deltasync.wire.messages import ParameterSpec

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
Sums = NDArray[np.uint64]
BOTH: tuple[Kernels, Kernels] = ("torch", "triton")
DENSITIES = [0, 0.05, 0.6, 1]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "bfloat16": [(3, 1500), (0, 4), (1,), (4096,), (2, 4103)],
    "float32": [(1,), (70, 61)],
    "uint8": [(4097,), (8,)],
    "int64": [(5, 100)],
}
SMALL: dict[str, list[tuple[int, ...]]] = {"uint8": [(16,)] * 30}


def specs_of(shapes: dict[str, list[tuple[int, ...]]]) -> tuple[ParameterSpec, ...]:
    """Item sizes in turn, so that the space has them in another order."""
    pairs = [(dtype, shape) for dtype, some in shapes.items() for shape in some]
    pairs.sort(key=lambda pair: len(pair[1]))
    return tuple(
        ParameterSpec((f"p{n}",), shape, dtypes.BY_NAME[dtype])
        for n, (dtype, shape) in enumerate(pairs)
    )


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of any bits, which begins at no multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(np.prod(shape))
    words = torch.randint(-(1 << 62), 1 << 62, (numel + 1,), generator=generator)
    return words.view(dtype)[1 : numel + 1].view(*shape).to(DEVICE)


def model_of(specs: Sequence[ParameterSpec], seed: int = 0) -> list[Tensor]:
    return [random_bits(s.shape, torch_dtype(s.dtype), seed + n) for n, s in enumerate(specs)]


def step(tensors: Sequence[Tensor], density: float, seed: int) -> None:
    """Change some elements of each."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        changed = torch.rand(tensor.shape, generator=generator) < density
        as_bits(tensor).add_(changed.to(DEVICE))


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(one, other, strict=True))


def readers_of(specs: Sequence[ParameterSpec], tensors: Sequence[Tensor]) -> list[Reader]:
    return [WireReader.of(t, s.dtype, name=s.name) for t, s in zip(tensors, specs, strict=True)]


def packed(plan: Plan) -> list[tuple[Sizes, Tensor]]:
    """Its payloads, over memory that was not zero."""
    found = []
    for bucket in plan.buckets():
        payload = torch.full((bucket.sizes.num_bytes,), 77, dtype=torch.uint8, device=bucket.device)
        bucket.pack(payload, lambda: None)
        found.append((bucket.sizes, payload))
    return found


def agree(one: Sequence[tuple[Sizes, Tensor]], other: Sequence[tuple[Sizes, Tensor]]) -> None:
    assert [sizes for sizes, _ in one] == [sizes for sizes, _ in other]
    for (_, left), (_, right) in zip(one, other, strict=True):
        assert torch.equal(left.cpu(), right.cpu())


@dataclass
class Ends:
    """A sender and a receiver, once as hosts work and once as kernels do."""

    snapshots: list[Snapshot]
    lives: list[LiveWeights]

    @classmethod
    def of(
        cls,
        shares: Sequence[Share],
        readers: Sequence[Reader],
        specs: Sequence[ParameterSpec],
        flats: Callable[[], dict[int, Live]],
    ) -> Ends:
        snapshots = [snapshot_of(shares, readers, kernels=kind) for kind in BOTH]
        lives = [LiveWeights(flats(), Space(whole(specs)), kernels=kind) for kind in BOTH]
        assert snapshots[1].device == lives[1].device == DEVICE
        alike(one.ledger.sums for one in snapshots)
        bind(lives)
        return cls(snapshots, lives)

    def compare(
        self, readers: Sequence[Reader], *, bucket_bytes: int = 1 << 16, max_held: int = 1 << 30
    ) -> list[Delta]:
        plans = [
            one.compare(readers, bucket_bytes=bucket_bytes, max_held_bytes=max_held, base_version=1)
            for one in self.snapshots
        ]
        one, other = plans
        assert (one.payload_bytes, one.places) == (other.payload_bytes, other.places)
        assert one.held_bytes == other.held_bytes
        assert one.nnz == other.nnz
        assert np.array_equal(one.counts, other.counts)
        return plans

    def sync(
        self,
        readers: Sequence[Reader],
        *,
        in_place: bool = False,
        bucket_bytes: int = 1 << 16,
        max_held: int = 1 << 30,
    ) -> None:
        """Send what has changed, undo it unless in place, and write it again."""
        plans = self.compare(readers, bucket_bytes=bucket_bytes, max_held=max_held)
        payloads, others = map(packed, plans)
        agree(payloads, others)
        alike(plan.ledger.sums for plan in plans)
        self.write(payloads, plans[0].places, in_place=in_place)
        for snapshot, plan in zip(self.snapshots, plans, strict=True):
            plan.decided()
            every = np.arange(snapshot.space.num_chunks)
            assert np.array_equal(snapshot.measure(every), snapshot.ledger.sums)

    def write(
        self, payloads: Sequence[tuple[Sizes, Tensor]], places: int, *, in_place: bool
    ) -> None:
        space = self.snapshots[0].space
        most = staged_bytes_of(payload_bytes=sum(s.num_bytes for s, _ in payloads), places=places)
        stagings = []
        for live in self.lives:
            before = live.ledger.sums
            staging = Staging(live, max_bytes=most, in_place=in_place)
            lane = live.lane(space)
            lane.begin()
            for sizes, payload in payloads:
                memory = payload.clone()
                changes = Changes.of(memory, sizes)
                received = Received(lane, changes)
                lane.check(received)
                staging.stage(received)
                memory.fill_(55)
            assert staging.commit() == staging.ledger.total
            if not in_place:
                staging.undo()
                assert np.array_equal(measured(live), before)
                staging.commit()
            assert np.array_equal(measured(live), staging.ledger.sums)
            live.ledger = staging.ledger
            stagings.append(staging)
        alike(staging.ledger.sums for staging in stagings)


def measured(live: LiveWeights) -> Sums:
    return live.measure(np.arange(live.space.num_chunks))


def bind(lives: Sequence[LiveWeights]) -> None:
    """Know the digests of all, which are the same."""
    alike(map(measured, lives))
    for live in lives:
        live.ledger.sums[:] = measured(live)


def alike(sums: Iterable[Sums]) -> None:
    assert all(np.array_equal(*pair) for pair in pairwise(sums))


def flats_of(tensors: Sequence[Tensor]) -> dict[int, Live]:
    return {number: Flat.of(tensor) for number, tensor in enumerate(tensors)}


def ends_of(
    specs: Sequence[ParameterSpec], source: Sequence[Tensor]
) -> tuple[Ends, list[Reader], list[list[Tensor]]]:
    """Both ends of a model, what the senders read, and what the receivers write."""
    copies = [[t.clone() for t in source] for _ in BOTH]
    left, readers = iter(copies), readers_of(specs, source)
    ends = Ends.of(whole(specs), readers, specs, lambda: flats_of(next(left)))
    return ends, readers, copies


@pytest.mark.parametrize(("shapes", "density"), [*((SHAPES, one) for one in DENSITIES), (SMALL, 1)])
def test_syncs_are_those_of_hosts(shapes: dict[str, list[tuple[int, ...]]], density: float) -> None:
    """Small tensors that go whole take no more than was declared."""
    specs = specs_of(shapes)
    source = model_of(specs)
    ends, readers, copies = ends_of(specs, source)
    step(source, density, 1)
    ends.sync(readers)
    assert all(same(copy, source) for copy in copies)
    step(source, density, 2)
    ends.sync(readers, in_place=True, bucket_bytes=1 << 26, max_held=0)
    assert all(same(copy, source) for copy in copies)


def test_what_was_overwritten_early_goes_whole_after_an_abort() -> None:
    specs = specs_of(SHAPES)
    source = model_of(specs)
    ends, readers, copies = ends_of(specs, source)
    step(source, 0.01, 1)
    aborted = ends.compare(readers, max_held=0)
    agree(*map(packed, aborted))
    ends.sync(readers)
    assert all(same(copy, source) for copy in copies)
    assert not ends.compare(readers)[1].nnz


MATRIX = ParameterSpec(("matrix",), (45, 130), dtypes.BY_NAME["float32"])
WIDER = ParameterSpec(("wider",), (60, 130), dtypes.BY_NAME["float32"])
LONG = ParameterSpec(("long",), ((1 << 18) + 4200,), dtypes.BY_NAME["uint8"])


def shares_of_ranks() -> list[Share]:
    """Columns of a matrix, single elements of another, and a run that reaches into a new chunk."""
    return [
        Share(0, WIDER, Region(7, ((55, 130), (80, 1)))),
        Share(1, replace(MATRIX, names=("single",)), Region(3, ((2900, 2),))),
        Share(2, LONG, Region.run((1 << 18) - 6000, 9100)),
    ]


def views_of(shares: Sequence[Share], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a rank has of tensors: views."""
    return [s.region.view(tensors[s.number]) for s in shares]


@pytest.mark.parametrize("density", [0.002, 0.7])
def test_shares_with_gaps_are_sent_as_hosts_send_them(density: float) -> None:
    shares = shares_of_ranks()
    specs = tuple(share.spec for share in shares)
    tensors = model_of(specs)
    views = views_of(shares, [t.view(-1).clone() for t in tensors])
    copies = [[t.clone() for t in tensors] for _ in BOTH]
    for copy in copies:
        for view, share in zip(views, shares, strict=True):
            share.region.view(copy[share.number]).copy_(view)
    left = iter(copies)
    readers = readers_of(specs, views)
    ends = Ends.of(shares, readers, specs, lambda: flats_of(next(left)))
    step(views, density, 1)
    ends.sync(readers)
    for copy in copies:
        assert same(views_of(shares, copy), views)
    assert same(*copies)


def lives_of(specs: Sequence[ParameterSpec], storages: Sequence[Tensor]) -> dict[int, Live]:
    """Transposed, in parts, not at all, and as codes of 4 bits."""
    transposed = storages[0].view(130, 45).T
    source = (20, 130), (120, 1)
    pieces = [
        Piece.of("", Region(130 * 2, source), Region(5, ((20, 120), (120, 1)))),
        Piece.of("", Region(130 * 23, source), Region(3000, ((20, 1), (120, 20)))),
        Piece.of("", Region(130 * 44 + 1, ((60, 2),)), Region(5500, ((60, 1),))),
    ]
    count = 2 * specs[3].dtype.item_size
    numel = specs[3].numel // 2
    held = [(Region.run(0, numel), 0), (Region.run(numel + 3, numel - 3), 1)]
    codes = [
        Piece("", source, Region(numel * (nth * count + code), ((source.numel, 1),)), code)
        for source, nth in held
        for code in range(count)
    ]
    return {
        0: Flat.of(transposed),
        1: Part.of(pieces, {"": storages[1].view(-1)}, name="parts"),
        3: Codes(codes, {"": storages[3].view(-1)}, specs[3].dtype, specs[3].numel),
        4: Flat.of(storages[4]),
    }


@pytest.mark.parametrize(("codes", "with_gaps"), [("int32", False), ("uint8", True)])
def test_live_weights_that_are_no_runs(codes: str, with_gaps: bool) -> None:
    specs = (
        *(replace(MATRIX, names=(name,)) for name in ("transposed", "parts", "elsewhere")),
        ParameterSpec(("codes",), (2, 600), dtypes.BY_NAME[codes]),
        ParameterSpec(("run",), (90,), dtypes.BY_NAME[codes]),
    )
    shares: tuple[Share, ...] = whole(specs)
    if with_gaps:
        region = Region(131, ((40, 130), (110, 1)))
        shares = tuple(replace(s, region=region) if s.spec.numel == 5850 else s for s in shares)
    tensors = model_of(specs)
    views = views_of(shares, [t.view(-1).clone() for t in tensors])
    storages = [model_of(specs, seed=5) for _ in BOTH]
    left = iter(storages)
    readers = readers_of(specs, views)
    snapshots = [snapshot_of(shares, readers, kernels=kind) for kind in BOTH]
    lives = [
        LiveWeights(lives_of(specs, next(left)), Space(whole(specs)), kernels=kind) for kind in BOTH
    ]
    bind(lives)
    step(views, 0.01, 1)
    ends = Ends(snapshots, lives)
    ends.sync(readers)
    assert same(*storages)
    ends.write(packed(snapshots[1].full(bucket_bytes=1 << 16)), 0, in_place=True)
    assert same(*storages)
    for number, flat in lives[1].flats.items():
        region = shares[number].region
        where = region.places(torch.arange(region.numel)).to(DEVICE)
        kept = flat.keeps(where)
        sent = as_bits(views[number]).reshape(-1)
        positions = where if kept is None else where[kept]
        assert torch.equal(flat.gather(positions), sent if kept is None else sent[kept])


def test_sources_are_read_as_hosts_read_them() -> None:
    """Rounded, with any NaN; strided; narrowed in another way; and two at once in a section."""
    names = ["bfloat16", "bfloat16", "bfloat16", "float16", "float32"]
    specs = tuple(
        ParameterSpec((f"p{n}",), (50, 131), dtypes.BY_NAME[name]) for n, name in enumerate(names)
    )
    wide = [random_bits((50, 131), torch.float32, seed) for seed in range(3)]
    odd = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x3F808000, 0x3F818000], dtype=torch.int32)
    for tensor in wide:  # NaN of three kinds, and halves
        tensor[3, :5] = odd.view(torch.float32)
    source = [
        wide[0],
        random_bits((50, 131), torch.bfloat16, 7),
        random_bits((50, 262), torch.bfloat16, 8)[:, ::2],
        wide[1],
        wide[2].T.contiguous().T,
    ]
    readers = readers_of(specs, source)
    snapshots = [snapshot_of(whole(specs), readers, kernels=kind) for kind in BOTH]
    ends = Ends(snapshots, lives=[])
    for seed, density in enumerate((0.01, 0.9)):
        step(source, density, seed)
        ends.sync(readers)


def stage_all(staging: Staging, lane: Lane, payloads: Sequence[tuple[Sizes, Tensor]]) -> None:
    """Stage what a lane carries, and see whether all of it is good."""
    for sizes, payload in payloads:
        changes = Changes.of(payload, sizes)
        received = Received(lane, changes)
        lane.check(received)
        staging.stage(received)
    assert staging.ledger


def test_a_bad_payload_stops_those_after_it() -> None:
    """In place, where a payload is written as soon as its check was launched."""
    specs = specs_of({"bfloat16": [(4096,), (4096,)]})
    source = model_of(specs)
    snapshot = snapshot_of(whole(specs), readers_of(specs, source), kernels="triton")
    live = [t.clone() for t in source]
    step(source, 0.4, 3)
    readers = readers_of(specs, source)
    plan = snapshot.compare(readers, bucket_bytes=1 << 13, max_held_bytes=0, base_version=1)
    payloads = packed(plan)
    sizes, first = payloads[0]
    Changes.of(first, sizes).places[0] = 4096
    weights = LiveWeights(flats_of(live), Space(whole(specs)), kernels="triton")
    before = [t.clone() for t in live]
    assert len(payloads) == 2
    with pytest.raises(InvalidIndices):
        stage_all(Staging(weights, max_bytes=1 << 20, in_place=True), weights.lane(), payloads)
    assert same(live, before)


def test_weights_that_do_not_take_what_is_written_are_noticed() -> None:
    specs = specs_of({"bfloat16": [(64,), (64,)]})
    source = model_of(specs)
    readers = readers_of(specs, source)
    snapshot = snapshot_of(whole(specs), readers, kernels="triton")
    live = LiveWeights(flats_of(model_of(specs, 1)), Space(whole(specs)), kernels="triton")
    staging = Staging(live, max_bytes=1 << 20)
    stage_all(staging, live.lane(), packed(snapshot.full(bucket_bytes=1 << 16)))
    tally = staging._tally
    assert isinstance(tally, DeviceTally)
    tally.predicted[0, 0] += 1
    with pytest.raises(DigestMismatch, match="read back"):
        staging.commit()
    staging.undo()
    tally.predicted[1, 0] += 1
    with pytest.raises(DigestMismatch, match="undo failed"):
        staging.undo()


@pytest.mark.parametrize("begin", [0, 1])
def test_negative_zero_is_a_change(begin: int) -> None:
    """In whole tiles and in the last; also of tensors that begin at no multiple of 16 bytes."""
    specs = specs_of({"bfloat16": [(4096 + 11,)], "float32": [(4096 + 3,)], "uint8": [(4100,)]})
    source = [
        torch.zeros(s.numel + begin, dtype=torch_dtype(s.dtype), device=DEVICE)[begin:]
        for s in specs
    ]
    readers = readers_of(specs, source)
    snapshots = [snapshot_of(whole(specs), readers, kernels=kind) for kind in BOTH]
    for tensor in source:
        top = torch.tensor(-(1 << 8 * tensor.element_size() - 1), dtype=torch.int64)
        as_bits(tensor)[[0, 1, 15, 4095, 4096, -1]] = top.to(as_bits(tensor).dtype).to(DEVICE)
    plans = Ends(snapshots, lives=[]).compare(readers, max_held=0)
    assert plans[1].nnz == 3 * 6
    agree(*map(packed, plans))


def test_kernels_are_demanded_where_they_cannot_work() -> None:
    cpu, gpus = torch.device("cpu"), [torch.device("cuda", n) for n in range(2)]
    assert device_for({gpus[0]}, 1, "torch") is None
    assert device_for({cpu}, 1, "auto") is None
    assert device_for({gpus[0]}, 1, "auto") == gpus[0]
    assert device_for(set(gpus), 1, "auto") is None
    assert device_for({gpus[0]}, 0, "auto") is None
    for devices, numel, reason in (
        (set(gpus), 1, "live on 2 devices"),
        ({gpus[0]}, 0, "no elements"),
    ):
        with pytest.raises(ConfigError, match=reason):
            device_for(devices, numel, "triton")
