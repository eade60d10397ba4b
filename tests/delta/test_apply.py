"""Staged and in-place writes of a whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.apply import InPlace, Staging, staged_bytes_of
from deltasync.delta.bits import Flat, WireReader
from deltasync.delta.diff import diff_model
from deltasync.delta.digests import DigestLedger
from deltasync.delta.patch import Run
from deltasync.delta.policy import Policy
from deltasync.delta.snapshot import Snapshot
from deltasync.errors import DigestMismatch, InvalidIndices, LimitExceeded
from deltasync.testing import strategies as own
from deltasync.testing.strategies import relaid, same_bits, specs_of
from deltasync.wire.messages import ParameterSpec

Model = dict[str, Tensor]


@dataclass
class Sync:
    """A live model, the model that it is to become, and the runs that make it so."""

    live: Model
    new: Model
    flats: dict[int, Flat]
    ledger: DigestLedger
    runs: list[tuple[int, Run]]
    staged_bytes: int


def ledger_of(model: Model, chunk_numel: int) -> DigestLedger:
    ledger = DigestLedger(specs_of(model), chunk_numel=chunk_numel)
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
    snapshot = Snapshot(specs, old, chunk_numel=policy.chunk_numel_on("cpu"))
    delta = diff_model(readers, snapshot, policy=policy, max_held_bytes=1 << 40)
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
    new = {name: draw(own.mutations(tensor)) for name, tensor in live.items()}
    return sync_of(live, new, draw(own.policies()), draw(st.sampled_from([1, 5, 16, 1000])))


def copies(model: Model) -> Model:
    return {name: relaid(tensor, "contiguous") for name, tensor in model.items()}


def equal(left: Model, right: Model) -> bool:
    return all(same_bits(left[name], right[name]) for name in left)


@given(sync=syncs())
def test_stage_writes_nothing_commit_all_and_undo_takes_it_back(sync: Sync) -> None:
    before = copies(sync.live)
    staging = Staging(sync.flats, sync.ledger, max_bytes=sync.staged_bytes)
    for number, run in sync.runs:
        staging.stage(number, run)
    assert staging.staged_bytes == sync.staged_bytes
    assert equal(sync.live, before)
    assert staging.ledger.total == total(sync.new)
    assert sync.ledger.total == total(before)
    assert staging.commit() == total(sync.new)
    assert equal(sync.live, sync.new)
    staging.undo()
    assert equal(sync.live, before)
    assert np.array_equal(staging.ledger.sums, ledger_of(sync.new, sync.ledger.chunk_numel).sums)


@given(sync=syncs())
def test_in_place_writes_each_run_as_it_comes(sync: Sync) -> None:
    in_place = InPlace(sync.flats, sync.ledger)
    for number, run in sync.runs:
        in_place.stage(number, run)
    assert equal(sync.live, sync.new)
    assert in_place.commit() == total(sync.new)
    assert in_place.staged_bytes == 0
    assert np.array_equal(in_place.ledger.sums, ledger_of(sync.new, sync.ledger.chunk_numel).sums)


@given(sync=syncs(), held=st.sets(st.integers(0, 4)))
def test_parameters_of_other_ranks_are_checked_but_not_staged(sync: Sync, held: set[int]) -> None:
    flats = {number: flat for number, flat in sync.flats.items() if number in held}
    before = copies(sync.live)
    staging = Staging(flats, sync.ledger, max_bytes=sync.staged_bytes)
    for number, run in sync.runs:
        staging.stage(number, run)
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
    staging = Staging(sync.flats, sync.ledger, max_bytes=declared)

    def stage_all() -> None:
        for number, run in sync.runs:
            staging.stage(number, run)

    with pytest.raises(LimitExceeded, match=r"layers\.\d\.weight: "):
        stage_all()
    assert equal(sync.live, before)


@given(sync=syncs())
def test_staged_runs_outlive_the_buffer_they_came_in(sync: Sync) -> None:
    staging = Staging(sync.flats, sync.ledger, max_bytes=None)
    for number, run in sync.runs:
        assert run.bits is not None
        buffers = [None if t is None else t.clone() for t in (run.indices, run.bits)]
        staging.stage(number, Run(run.start, run.span, *buffers))
        for buffer in buffers:
            if buffer is not None:
                buffer.fill_(0)
    staging.commit()
    assert equal(sync.live, sync.new)


BAD_INDICES = {
    "unsorted": [3, 2],
    "repeated": [2, 2],
    "negative": [-1, 2],
    "beyond the span": [1, 6],
    "far beyond": [1, (1 << 31) - 1],
}


@pytest.mark.parametrize("indices", BAD_INDICES.values(), ids=BAD_INDICES.keys())
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("how", ["staged", "in place"])
def test_bad_indices_are_found_before_any_write(how: str, held: bool, indices: list[int]) -> None:
    live = {"w": torch.zeros(10, dtype=torch.int16)}
    flats = {0: Flat.of(live["w"])} if held else {}
    ledger = ledger_of(live, 4)
    writer = Staging(flats, ledger, max_bytes=None) if how == "staged" else InPlace(flats, ledger)
    bits = torch.ones(2, dtype=torch.int16)
    with pytest.raises(InvalidIndices, match="w: "):
        writer.stage(0, Run(2, 6, torch.tensor(indices, dtype=torch.int32), bits))
    assert not live["w"].any()
    assert writer.ledger.total == ledger.total


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


def faulty(tensor: Tensor, **arguments: int) -> dict[int, Flat]:
    return {0: cast("Flat", Faulty(Flat.of(tensor), **arguments))}


RUNS = {
    "sparse": Run(0, 10, torch.tensor([1, 4], dtype=torch.int32), torch.ones(2, dtype=torch.int16)),
    "dense": Run(2, 6, None, torch.ones(6, dtype=torch.int16)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("layout", ["contiguous", "stepped"])
def test_a_write_that_does_not_stick_shows_in_the_digest(run: Run, layout: own.Layout) -> None:
    live = relaid(torch.zeros(10, dtype=torch.int16), layout)
    ledger = ledger_of({"w": live}, 4)
    staging = Staging(faulty(live, stuck=4), ledger, max_bytes=None)
    staging.stage(0, run)
    digest = staging.commit()
    assert digest != staging.ledger.total
    assert digest == ledger_of({"w": live}, 4).total
    staging.undo()
    assert not live.any()
    in_place = InPlace(faulty(live, stuck=4), ledger)
    in_place.stage(0, run)
    assert in_place.commit() == digest


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_an_undo_that_does_not_stick_is_an_error(run: Run) -> None:
    live = torch.zeros(10, dtype=torch.int16)
    flats = faulty(live, stuck=4, times=0)
    staging = Staging(flats, ledger_of({"w": live}, 4), max_bytes=None)
    staging.stage(0, run)
    staging.commit()
    cast("Any", flats[0]).times = 1
    with pytest.raises(DigestMismatch, match="w: undo failed"):
        staging.undo()


def test_undo_after_a_write_that_raised_restores_what_was_written() -> None:
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    sync = sync_of(live, {name: t + 1 for name, t in live.items()}, Policy(), 1000)
    broken = cast("Any", Faulty(sync.flats[1], stuck=0))
    staging = Staging(sync.flats | {1: broken}, sync.ledger, max_bytes=None)
    for number, run in sync.runs:
        staging.stage(number, run)
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


@pytest.mark.parametrize("how", ["staged", "in place"])
def test_positions_beyond_int32(how: str) -> None:
    spec = ParameterSpec(("w",), (1 << 20, 1 << 12), dtypes.BY_NAME["bfloat16"])
    live = Sparse()
    flats = {0: cast("Flat", live)}
    ledger = DigestLedger([spec], chunk_numel=1 << 18)
    writer = Staging(flats, ledger, max_bytes=None) if how == "staged" else InPlace(flats, ledger)
    end = spec.numel
    indices = torch.tensor([0, 7, (1 << 31) - 2], dtype=torch.int32)
    writer.stage(0, Run(5, (1 << 31) - 1, indices, torch.tensor([1, 2, 3], dtype=torch.int16)))
    writer.stage(0, Run(1 << 31, 8, indices[:2], torch.tensor([4, 5], dtype=torch.int16)))
    writer.stage(0, Run(end - 2, 2, None, torch.tensor([6, 7], dtype=torch.int16)))
    digest = writer.commit()
    expected = {5: 1, 12: 2, (1 << 31) + 3: 3, 1 << 31: 4, (1 << 31) + 7: 5, end - 2: 6, end - 1: 7}
    assert live.values == expected
    assert digest == writer.ledger.total
    if isinstance(writer, Staging):
        writer.undo()
        assert not any(live.values.values())


@given(
    num=st.integers(0, 1 << 40), item=st.sampled_from([1, 2, 4, 8]), dense=st.integers(0, 1 << 40)
)
def test_what_a_begin_declares(num: int, item: int, dense: int) -> None:
    needed = staged_bytes_of(sparse_bytes=(4 + item) * num, dense_bytes=dense)
    assert needed == num * (8 + 2 * item) + 2 * dense
