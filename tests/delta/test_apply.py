"""Staged and in-place writes of a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.backend import snapshot_of
from deltasync.delta.bits import Flat, Live, Run
from deltasync.delta.bucket import MIN_BUCKET_BYTES, staged_bytes_of
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import DeltaPlan
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.errors import DigestMismatch, InvalidIndices, LimitExceeded
from deltasync.testing.bits import specs_of
from deltasync.testing.payloads import stage_runs
from deltasync.wire.messages import ParameterSpec
from tests.worlds import strategies as own
from tests.worlds.strategies import relaid, same_bits

Model = dict[str, Tensor]
BUCKET_BYTES = st.sampled_from([MIN_BUCKET_BYTES, 1 << 20])
I16, I32 = partial(torch.tensor, dtype=torch.int16), partial(torch.tensor, dtype=torch.int32)


@dataclass
class Sync:
    """A live model, the model that it is to become, and the runs that make it so."""

    live: Model
    new: Model
    flats: dict[int, Flat]
    ledger: DigestLedger
    runs: list[tuple[int, Run]]
    staged_bytes: int

    def stage(self, staging: Staging, bucket_bytes: int = 1 << 20) -> None:
        stage_runs(staging, self.runs, self.ledger.specs, bucket_bytes=bucket_bytes)


def ledger_of(model: Model, chunk_numel: int) -> DigestLedger:
    ledger = DigestLedger(whole(specs_of(model)), chunk_numel=chunk_numel)
    for number, tensor in enumerate(model.values()):
        ledger.measure(number, Flat.of(tensor).read)
    return ledger


def total(model: Model) -> int:
    return ledger_of(model, 1000).total


def sync_of(live: Model, new: Model, policy: Policy, chunk_numel: int) -> Sync:
    specs = specs_of(live)
    old = [
        WireReader.of(t, s.dtype, name=s.name) for t, s in zip(live.values(), specs, strict=True)
    ]
    readers = [
        WireReader.of(t, s.dtype, name=s.name) for t, s in zip(new.values(), specs, strict=True)
    ]
    snapshot = snapshot_of(whole(specs), old, chunk_numel=policy.chunk_numel_on("cpu"))
    delta = snapshot.compare(
        readers, policy=policy, bucket_bytes=1 << 20, max_held_bytes=1 << 40, base_version=0
    )
    assert isinstance(delta, DeltaPlan)
    runs = []
    for change in delta.changes:
        for run in change.runs or ():
            bits = run.bits
            if bits is None:
                bits = readers[change.parameter].read(run.start, run.stop)
            runs.append((change.parameter, Run(run.start, run.span, run.indices, bits)))
    needed = staged_bytes_of(
        sparse_bytes=delta.sparse_bytes,
        dense_bytes=delta.dense_bytes,
    )
    flats = {number: Flat.of(tensor) for number, tensor in enumerate(live.values())}
    return Sync(live, new, flats, ledger_of(live, chunk_numel), runs, needed)


@st.composite
def syncs(draw: st.DrawFn) -> Sync:
    """Syncs in which sender and receiver cut their parameters into different chunks."""
    live = draw(own.models())
    if draw(st.booleans()):
        live = fused(live)
    new = {name: draw(own.mutations(tensor)) for name, tensor in live.items()}
    return sync_of(live, new, draw(own.policies()), draw(st.sampled_from([1, 5, 16, 1000])))


def staging_of(flats: Mapping[int, Live], ledger: DigestLedger, **options: Any) -> Staging:
    return Staging(Lines(flats, len(ledger.specs)), ledger, **options)


def fused(model: Model) -> Model:
    """Those that are contiguous in one storage, the last first, as engines fuse and stack."""
    buffer = torch.zeros(sum(t.nbytes + 8 for t in model.values()), dtype=torch.uint8)
    together, end = dict(model), len(buffer)
    for name, tensor in model.items():
        if tensor.is_contiguous():
            begin = (end - tensor.nbytes) // 8 * 8
            piece = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            together[name], end = piece.copy_(tensor), begin
    return together


def copies(model: Model) -> Model:
    return {name: relaid(tensor, "contiguous") for name, tensor in model.items()}


def equal(left: Model, right: Model) -> bool:
    return all(same_bits(left[name], right[name]) for name in left)


@pytest.mark.promise("All or nothing", "Staging writes nothing.")
@given(sync=syncs(), bucket_bytes=BUCKET_BYTES)
def test_stage_writes_nothing_commit_all_and_undo_takes_it_back(
    sync: Sync, bucket_bytes: int
) -> None:
    before = copies(sync.live)
    staging = staging_of(sync.flats, sync.ledger, max_bytes=sync.staged_bytes)
    sync.stage(staging, bucket_bytes)
    assert staging.staged_bytes == sync.staged_bytes
    assert equal(sync.live, before)
    assert staging.ledger.total == total(sync.new)
    assert sync.ledger.total == total(before)
    assert staging.commit() == total(sync.new)
    assert equal(sync.live, sync.new)
    staging.undo()
    assert equal(sync.live, before)
    assert np.array_equal(staging.ledger.sums, ledger_of(sync.new, sync.ledger.chunk_numel).sums)


@given(sync=syncs(), bucket_bytes=BUCKET_BYTES)
def test_in_place_says_so_before_it_writes_and_only_then(sync: Sync, bucket_bytes: int) -> None:
    before, said = copies(sync.live), list[bool]()
    staging = staging_of(
        sync.flats,
        sync.ledger,
        in_place=True,
        writing=lambda: said.append(bool(said) or equal(sync.live, before)),
    )
    sync.stage(staging, bucket_bytes)
    assert all(said)
    assert said or equal(sync.live, before)
    said.clear()
    elsewhere = staging_of({}, sync.ledger, in_place=True, writing=lambda: said.append(True))
    sync.stage(elsewhere, bucket_bytes)  # of a bucket nothing is held: nothing is written
    assert not said


@given(sync=syncs(), bucket_bytes=BUCKET_BYTES)
def test_in_place_writes_each_bucket_as_it_comes(sync: Sync, bucket_bytes: int) -> None:
    in_place = staging_of(sync.flats, sync.ledger, in_place=True)
    sync.stage(in_place, bucket_bytes)
    assert equal(sync.live, sync.new)
    assert in_place.commit() == total(sync.new)
    assert in_place.staged_bytes == 0
    assert np.array_equal(in_place.ledger.sums, ledger_of(sync.new, sync.ledger.chunk_numel).sums)


@given(sync=syncs(), bucket_bytes=BUCKET_BYTES, held=st.sets(st.integers(0, 4)))
def test_parameters_of_other_ranks_are_checked_but_not_staged(
    sync: Sync, bucket_bytes: int, held: set[int]
) -> None:
    flats = {number: flat for number, flat in sync.flats.items() if number in held}
    before = copies(sync.live)
    staging = staging_of(flats, sync.ledger, max_bytes=sync.staged_bytes)
    sync.stage(staging, bucket_bytes)
    assert staging.staged_bytes <= sync.staged_bytes
    staging.commit()
    for number, name in enumerate(sync.live):
        wanted = sync.new if number in flats else before
        assert same_bits(sync.live[name], wanted[name])


@given(sync=syncs(), lie=st.integers(1, 1 << 20))
def test_a_sync_larger_than_declared_is_refused_before_any_write(sync: Sync, lie: int) -> None:
    if not sync.runs:
        return
    before = copies(sync.live)
    declared = max(0, sync.staged_bytes - lie)
    staging = staging_of(sync.flats, sync.ledger, max_bytes=declared)
    with pytest.raises(LimitExceeded, match=r"layers\.\d\.weight: "):
        sync.stage(staging)
    assert equal(sync.live, before)


BAD_INDICES = {
    "unsorted": [3, 2],
    "repeated": [2, 2],
    "negative": [-1, 2],
    "beyond the span": [1, 6],
    "far beyond": [1, (1 << 31) - 1],
}


@pytest.mark.parametrize("indices", BAD_INDICES.values(), ids=BAD_INDICES.keys())
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
def test_bad_indices_are_found_before_any_write(
    in_place: bool, held: bool, indices: list[int]
) -> None:
    live = {"w": torch.zeros(10, dtype=torch.int16)}
    flats = {0: Flat.of(live["w"])} if held else {}
    ledger = ledger_of(live, 4)
    writer = staging_of(flats, ledger, in_place=in_place)
    bits = torch.ones(2, dtype=torch.int16)
    good, bad = Run(0, 2, I32([0, 1]), bits), Run(2, 6, I32(indices), bits)
    with pytest.raises(InvalidIndices, match="w: "):
        stage_runs(writer, [(0, good), (0, bad)], ledger.specs)
    assert not live["w"].any()
    assert writer.ledger.total == ledger.total


@pytest.mark.parametrize("bad", range(4))
def test_in_place_a_bucket_is_checked_whole_before_its_first_element_is_written(bad: int) -> None:
    """Whatever way its rows are taken: by item size, or one by one where they are strided."""
    strided = torch.zeros(10, 2, dtype=torch.int32)[:, 0]
    live = {"a": torch.zeros(10, dtype=torch.int16), "b": torch.zeros(10, dtype=torch.int32)}
    live |= {"c": strided, "d": torch.zeros(10, dtype=torch.int8), "e": torch.zeros(10).bfloat16()}
    flats, said = {n: Flat.of(tensor) for n, tensor in enumerate(live.values())}, list[bool]()
    ledger = ledger_of(live, 4)
    runs = [(4, Run(0, 10, None, torch.ones(10, dtype=torch.int16)))]
    for number, tensor in enumerate([*live.values()][:4]):
        indices = I32([3, 2] if number == bad else [2, 3])
        runs.insert(number, (number, Run(0, 10, indices, torch.ones(2, dtype=tensor.dtype))))
    writer = staging_of(flats, ledger, in_place=True, writing=lambda: said.append(True))
    with pytest.raises(InvalidIndices, match=f"{[*live][bad]}: "):
        stage_runs(writer, runs, ledger.specs)
    assert [name for name, tensor in live.items() if tensor.any()] == []
    assert not said


@dataclass
class Faulty:
    """A parameter of which one element keeps its old bits whatever is written."""

    flat: Flat
    stuck: int
    times: int = 1 << 30

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flat, name)

    def _put_back(self, old: Tensor) -> None:
        if self.times > 0:
            self.flat.write(self.stuck, old)
        self.times -= 1

    def write(self, start: int, bits: Tensor) -> None:
        old = self.flat.read(self.stuck, self.stuck + 1).clone()
        self.flat.write(start, bits)
        self._put_back(old)

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        old = self.flat.read(self.stuck, self.stuck + 1).clone()
        self.flat.scatter(positions, bits)
        self._put_back(old)


class StuckLine(Tensor):
    """The storage of a faulty parameter."""

    of: Faulty

    def scatter_(self, dim: int, positions: Tensor, bits: Tensor) -> Tensor:  # type: ignore[override]
        self.of.scatter(positions, bits)
        return self


def faulty(tensor: Tensor, **arguments: int) -> tuple[Lines, Any]:
    """One parameter, however it is written."""
    broken = Faulty(Flat.of(tensor), **arguments)
    lines = Lines({0: broken.flat}, 1)
    line = broken.flat.line.as_subclass(StuckLine)
    line.of = broken
    lines.flats, lines.storages = cast("Any", ({0: broken}, [line]))
    return lines, broken


RUNS = {
    "sparse": Run(0, 10, torch.tensor([1, 4], dtype=torch.int32), torch.ones(2, dtype=torch.int16)),
    "dense": Run(2, 6, None, torch.ones(6, dtype=torch.int16)),
}


@pytest.mark.promise(
    "Checks",
    "What is written is read back; a write that does not persist is an error.",
)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("layout", ["contiguous", "stepped"])
def test_a_write_that_does_not_stick_is_an_error(run: Run, layout: own.Layout) -> None:
    live = relaid(torch.zeros(10, dtype=torch.int16), layout)
    ledger = ledger_of({"w": live}, 4)
    lines, _ = faulty(live, stuck=4)
    staging = Staging(lines, ledger)
    stage_runs(staging, [(0, run)], ledger.specs)
    with pytest.raises(DigestMismatch, match="w: the weights read back are not"):
        staging.commit()
    staging.undo()
    assert not live.any()
    in_place = Staging(lines, ledger, in_place=True)
    with pytest.raises(DigestMismatch, match="w: the weights read back are not"):
        stage_runs(in_place, [(0, run)], ledger.specs)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_an_undo_that_does_not_stick_is_an_error(run: Run) -> None:
    live = torch.zeros(10, dtype=torch.int16)
    lines, broken = faulty(live, stuck=4, times=0)
    ledger = ledger_of({"w": live}, 4)
    staging = Staging(lines, ledger)
    stage_runs(staging, [(0, run)], ledger.specs)
    staging.commit()
    broken.times = 2  # a dense run is put back by chunks, the stuck element with the second
    with pytest.raises(DigestMismatch, match="w: undo failed"):
        staging.undo()


def test_undo_after_a_write_that_raised_restores_what_was_written() -> None:
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    sync = sync_of(live, {name: t + 1 for name, t in live.items()}, Policy(), 1000)
    broken = cast("Any", Faulty(sync.flats[1], stuck=0))
    staging = staging_of(sync.flats | {1: broken}, sync.ledger)
    sync.stage(staging)
    broken.write = broken.scatter = None  # the first write of "b" raises
    with pytest.raises(TypeError):
        staging.commit()
    assert live["a"].all()
    del broken.write, broken.scatter
    staging.undo()
    assert equal(live, {"a": torch.zeros(4), "b": torch.zeros(4)})


@dataclass
class Sparse:
    """Stands in for a parameter too large to allocate: what is not written is 0."""

    values: dict[int, int] = field(default_factory=dict)
    line: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int16))

    def held(self, start: int, stop: int) -> None:
        pass

    def keeps(self, positions: Tensor) -> None:
        pass

    def read(self, start: int, stop: int) -> Tensor:
        return self.gather(torch.arange(start, stop))

    def gather(self, positions: Tensor) -> Tensor:
        found = [self.values.get(p, 0) for p in positions.tolist()]
        return torch.tensor(found, dtype=torch.int16)

    def write(self, start: int, bits: Tensor) -> None:
        self.scatter(torch.arange(start, start + len(bits)), bits)

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        self.values.update(zip(positions.tolist(), bits.tolist(), strict=True))


@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
def test_positions_beyond_int32(in_place: bool) -> None:
    spec = ParameterSpec(("w",), (1 << 20, 1 << 12), dtypes.BY_NAME["bfloat16"])
    live = Sparse()
    flats = {0: cast("Flat", live)}
    ledger = DigestLedger(whole([spec]), chunk_numel=1 << 18)
    writer = staging_of(flats, ledger, in_place=in_place)
    end = spec.numel
    runs = [
        Run(5, (1 << 31) - 1, I32([0, 7, (1 << 31) - 2]), I16([1, 2, 3])),
        Run((1 << 31) + 4, 4, I32([0, 3]), I16([4, 5])),
        Run(end - 2, 2, None, I16([6, 7])),
    ]
    stage_runs(writer, [(0, run) for run in runs], ledger.specs)
    digest = writer.commit()
    expected = {
        5: 1,
        12: 2,
        (1 << 31) + 3: 3,
        (1 << 31) + 4: 4,
        (1 << 31) + 7: 5,
        end - 2: 6,
        end - 1: 7,
    }
    assert live.values == expected
    assert digest == writer.ledger.total
    if not in_place:
        writer.undo()
        assert not any(live.values.values())


@given(
    num=st.integers(0, 1 << 40), item=st.sampled_from([1, 2, 4, 8]), dense=st.integers(0, 1 << 40)
)
def test_what_a_begin_declares(num: int, item: int, dense: int) -> None:
    needed = staged_bytes_of(sparse_bytes=(4 + item) * num, dense_bytes=dense)
    assert needed == num * (8 + 2 * item) + 2 * dense
