"""The snapshot's two phases: a delta is taken against it, the decision writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.backend import Backend, snapshot_of
from deltasync.delta.bits import Flat, Run, torch_dtype
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host.backend import DeltaPlan, HostBackend
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.testing.bits import specs_of
from deltasync.testing.payloads import stage_runs
from deltasync.wire.messages import ParameterSpec
from tests.worlds import strategies as own
from tests.worlds.strategies import relaid, same_bits

CHUNK = 8
POLICY = Policy(chunk_numel=CHUNK, dense_above=0.5)


def readers_of(model: dict[str, Tensor]) -> list[WireReader]:
    return [
        WireReader.of(tensor, spec.dtype, name=name)
        for (name, tensor), spec in zip(model.items(), specs_of(model), strict=True)
    ]


def snapshot(specs: Sequence[ParameterSpec], readers: list[WireReader]) -> HostBackend:
    taken = snapshot_of(whole(specs), readers, chunk_numel=CHUNK)
    assert isinstance(taken, HostBackend)
    return taken


def kept(snapshot: Backend, number: int) -> Tensor:
    """A parameter as it is kept, flat."""
    flat = snapshot.flats[number]
    assert isinstance(flat, Flat)
    return flat.tensor


@dataclass
class Link:
    """A sender and a receiver of one model, with nothing in between."""

    model: dict[str, Tensor]

    def __post_init__(self) -> None:
        self.specs = specs_of(self.model)
        self.readers = readers_of(self.model)
        self.snapshot = snapshot(self.specs, self.readers)
        self.live = {name: relaid(t, "stepped") for name, t in self.model.items()}
        self.ledger = self.snapshot.ledger.copy()

    def diff(self, max_held_bytes: int) -> DeltaPlan:
        return self.snapshot.compare(
            self.readers,
            policy=POLICY,
            bucket_bytes=1 << 20,
            max_held_bytes=max_held_bytes,
            base_version=0,
        )

    def sync(self, max_held_bytes: int, *, stop_after: int | None = None) -> DeltaPlan:
        """One sync; aborted once `stop_after` runs were packed, if that is said."""
        plan = self.diff(max_held_bytes)
        flats = {n: Flat.of(tensor) for n, tensor in enumerate(self.live.values())}
        staging = Staging(Lines(flats, len(flats)), self.ledger)
        for packed, (parameter, run) in enumerate(plan.runs()):
            if packed == stop_after:
                return plan
            bits = run.bits
            if bits is None:
                bits = plan.read(parameter, run.start, run.stop)
            plan.packed(parameter, run, bits)
            whole = Run(run.start, run.span, run.indices, bits)
            stage_runs(staging, [(parameter, whole)], self.ledger.specs)
        if stop_after is None:
            assert staging.commit() == plan.ledger.total
            self.ledger = staging.ledger
            plan.decided()
        return plan

    def assert_agree(self) -> None:
        assert len(self.snapshot.flats) == len(self.model)
        for number, name in enumerate(self.model):
            held = kept(self.snapshot, number).view(self.model[name].shape)
            assert same_bits(held, self.model[name]), name
            assert same_bits(self.live[name], self.model[name]), name
        fresh = snapshot(self.specs, self.readers)
        assert np.array_equal(fresh.ledger.sums, self.snapshot.ledger.sums)
        assert not self.snapshot.ahead


def mutate(model: dict[str, Tensor], data: st.DataObject) -> None:
    """Change the model in place, as an optimizer step does."""
    for tensor in model.values():
        own_bits = data.draw(own.mutations(tensor))
        Flat.of(tensor).write(0, Flat.of(own_bits).read(0, tensor.numel()))


@pytest.mark.promise("All or nothing", "A failed sync loses nothing: the next one covers both.")
@given(model=own.models(), data=st.data(), max_held=st.sampled_from([0, 30, 200, 1 << 30]))
def test_any_history_of_syncs_and_aborts_ends_bit_equal(
    model: dict[str, Tensor], data: st.DataObject, max_held: int
) -> None:
    link = Link(model)
    link.assert_agree()
    for stop_after in data.draw(st.lists(st.none() | st.integers(0, 6), max_size=3)):
        mutate(model, data)
        link.sync(max_held, stop_after=stop_after)
    mutate(model, data)
    link.sync(max_held)
    link.assert_agree()
    assert not link.diff(max_held).changes


@given(model=own.models(), data=st.data())
def test_the_delta_s_ledger_is_the_source_s(model: dict[str, Tensor], data: st.DataObject) -> None:
    link = Link(model)
    mutate(model, data)
    before = link.snapshot.ledger.sums.copy()
    delta = link.diff(1 << 30)
    fresh = snapshot(link.specs, link.readers)
    assert np.array_equal(delta.ledger.sums, fresh.ledger.sums)
    assert np.array_equal(link.snapshot.ledger.sums, before)
    assert delta.held_bytes == delta.sparse_bytes


def test_chunks_of_another_policy_than_the_snapshot_s_leave_the_digests_right() -> None:
    link = Link({"w": torch.zeros(20, dtype=torch.int16)})
    link.model["w"][:13] = 1
    delta = link.snapshot.compare(
        link.readers,
        policy=Policy(chunk_numel=5, dense_above=0.0),
        bucket_bytes=1 << 20,
        max_held_bytes=1 << 20,
        base_version=0,
    )
    fresh = snapshot(link.specs, link.readers)
    assert np.array_equal(delta.ledger.sums, fresh.ledger.sums)


def changed_link() -> Link:
    """Three parameters; of the first two, one element in ten was changed."""
    model = {f"w{n}": torch.zeros(100, dtype=torch.int16) for n in range(3)}
    link = Link(model)
    model["w0"][::10] = 1
    model["w1"][::10] = 2
    return link


@pytest.mark.promise(
    "Cost",
    "Memory beyond weights and snapshot stays within the bounds of the options.",
)
def test_held_bytes_are_bounded_and_the_rest_is_found_again() -> None:
    link = changed_link()
    whole = link.diff(1 << 30)
    assert [change.sparse_bytes for change in whole.changes] == [60, 60]
    assert whole.held_bytes == 120
    delta = link.diff(119)
    assert [change.runs is None for change in delta.changes] == [False, True]
    assert (delta.held_bytes, delta.sparse_bytes, delta.nnz) == (60, 120, 20)
    assert delta.ledger.total == whole.ledger.total


def test_aborted_sync_leads_to_a_dense_resend_of_just_what_was_overwritten() -> None:
    link = changed_link()
    before = kept(link.snapshot, 0).clone()
    link.sync(60, stop_after=5)  # w0 is one run and held; four chunks of w1 were packed
    assert link.snapshot.ahead == {1}
    assert same_bits(kept(link.snapshot, 0), before)
    link.model["w1"].zero_()  # back to what receivers hold: still has to be sent
    delta = link.sync(60)
    assert [(c.parameter, c.sparse_bytes, c.dense_bytes) for c in delta.changes] == [
        (0, 60, 0),
        (1, 0, 200),
    ]
    link.assert_agree()


@pytest.mark.promise(
    "Cost",
    "Runs that are not held before the decision are read from the source, and sent again "
    "after an abort.",
)
def test_a_dense_run_is_written_ahead_and_sent_again_after_an_abort() -> None:
    link = Link({"w": torch.zeros(20, dtype=torch.int16)})
    link.model["w"].fill_(1)
    link.sync(1 << 30, stop_after=1)
    assert link.snapshot.ahead == {0}
    [(run, nnz)] = link.snapshot.find(0, link.readers[0], POLICY)
    assert (run.indices, nnz) == (None, 20)
    link.sync(1 << 30)
    link.assert_agree()


def test_abort_before_anything_was_packed_overwrites_nothing() -> None:
    link = changed_link()
    link.sync(0, stop_after=0)
    assert not link.snapshot.ahead
    assert [c.sparse_bytes for c in link.sync(1 << 30).changes] == [60, 60]
    link.assert_agree()


def test_capture_takes_everything_and_forgets_what_was_ahead() -> None:
    link = changed_link()
    link.sync(0, stop_after=2)
    link.snapshot.capture(link.readers)
    assert not link.snapshot.ahead
    assert not link.diff(0).changes
    assert link.snapshot.num_bytes == 600


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_snapshot_is_kept_in_the_wire_dtype(wire: str) -> None:
    master = torch.tensor([1.0, -0.0, 1 / 3, torch.inf])
    reader = WireReader.of(master, dtypes.BY_NAME[wire], name="w")
    (spec,) = specs_of({"w": master})
    taken = snapshot_of(whole([spec]), [reader], chunk_numel=3)
    expected = master.to(torch_dtype(dtypes.BY_NAME[wire]))
    assert same_bits(kept(taken, 0), expected)
    ledger = DigestLedger(whole(specs_of({"w": expected})), chunk_numel=3)
    ledger.measure(0, Flat.of(expected).read)
    assert taken.ledger.total == ledger.total
