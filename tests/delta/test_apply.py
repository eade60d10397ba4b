"""What is wrong with a bucket is found before a write, and what was written wrong afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.backend import Applier, Kernels
from deltasync.delta.bits import Flat, Run
from deltasync.delta.bucket import BucketReader, ReadBucket
from deltasync.delta.host.staging import Lines, Staging
from deltasync.errors import DigestMismatch, InvalidIndices, LimitExceeded
from tests.delta.ends import Model, Receiver, copies, device_of, digests_of, equal, sole
from tests.worlds import strategies as own
from tests.worlds.payloads import payloads, stage_runs
from tests.worlds.strategies import relaid

BOTH: list[Kernels] = ["torch", "triton"]
both = pytest.mark.parametrize("kernels", BOTH)


def indices(*places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int32)


def opened(receiver: Receiver, *syncs: list[tuple[int, Run]]) -> list[ReadBucket]:
    """A bucket of each list of runs, each as if it were the first of its sync."""
    found = []
    for runs in syncs:
        [(payload, num_rows)] = payloads(runs, receiver.specs)
        there = payload.to(device_of(receiver.kernels))
        found.append(BucketReader(receiver.specs).open(there, num_rows))
    return found


def staging_of(receiver: Receiver, *, in_place: bool, said: list[bool]) -> Applier:
    return receiver.backend.stage(
        sparse_bytes=1,
        dense_bytes=0,
        max_bytes=0 if in_place else 1 << 20,
        writing=lambda: said.append(True),
    )


def written(staging: Applier, buckets: list[ReadBucket]) -> None:
    for bucket in buckets:
        staging.stage_bucket(bucket)
    staging.commit()


BAD_INDICES = {
    "unsorted": [3, 2],
    "repeated": [2, 2],
    "repeated at the end": [1, 2, 3, 3],
    "negative": [-1, 2],
    "far below": [-(1 << 31), 2],
    "beyond the span": [1, 6],
    "far beyond": [1, (1 << 31) - 1],
}


@pytest.mark.parametrize("bad", BAD_INDICES.values(), ids=BAD_INDICES.keys())
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
@both
def test_bad_indices_are_found_before_any_write(
    kernels: Kernels, in_place: bool, bad: list[int]
) -> None:
    """Of parameters that are held, too, and on the host of those of other ranks of the engine."""
    for number in (0, 1) if kernels == "torch" else (0,):
        receiver = Receiver(
            {n: torch.zeros(10, dtype=torch.int16) for n in "ab"}, kernels, held=[0]
        )
        said = list[bool]()
        staging = staging_of(receiver, in_place=in_place, said=said)
        bits = torch.ones(len(bad), dtype=torch.int16)
        good = number, Run(0, 2, indices(0, 1), bits[:2])
        buckets = opened(receiver, [good, (number, Run(2, 6, indices(*bad), bits))])
        with pytest.raises(InvalidIndices, match=f"{'ab'[number]}: "):
            written(staging, buckets)
        assert not receiver.live["a"].any()


@pytest.mark.promise("Errors", "In place, nothing of a bad bucket, or of later ones, is written.")
@pytest.mark.parametrize("bad", range(4))
@both
def test_in_place_a_bucket_is_checked_whole_before_its_first_element_is_written(
    kernels: Kernels, bad: int
) -> None:
    """Whatever way its rows are taken: by item size, or one by one where they are strided."""
    kinds = {"a": torch.int16, "b": torch.int32, "c": torch.int32, "d": torch.int8}
    kinds["e"] = torch.bfloat16
    model = {name: torch.zeros(10, dtype=dtype) for name, dtype in kinds.items()}
    receiver = Receiver(model, kernels, layout="contiguous")
    if kernels == "torch":
        strided = torch.zeros(10, 2, dtype=torch.int32)[:, 0]
        receiver = Receiver(model, layout="contiguous", instead={"c": strided})
    said = list[bool]()
    staging = staging_of(receiver, in_place=True, said=said)

    def runs(wrong: int | None) -> list[tuple[int, Run]]:
        found = [(4, Run(0, 10, None, torch.ones(10, dtype=torch.int16)))]
        for number, dtype in enumerate([*kinds.values()][:4]):
            places = indices(3, 3) if number == wrong else indices(2, 3)
            found.insert(number, (number, Run(0, 10, places, torch.ones(2, dtype=dtype))))
        return found

    buckets = opened(receiver, runs(bad), runs(None))
    with pytest.raises(InvalidIndices, match=f"{[*model][bad]}: "):
        written(staging, buckets)
    assert not any(tensor.any() for tensor in receiver.live.values())
    assert not said or kernels == "triton"  # which does not wait for what it finds


@given(model=own.models(), data=st.data(), lie=st.integers(1, 1 << 20))
def test_a_sync_larger_than_declared_is_refused_before_any_write(
    model: Model, data: st.DataObject, lie: int
) -> None:
    sender, receiver = sole(model), Receiver(model)
    sender.write({name: data.draw(own.mutations(tensor)) for name, tensor in model.items()})
    plan, before = sender.delta(), copies(receiver.live)
    room = receiver.backend.stage(
        sparse_bytes=max(0, plan.sparse_bytes - lie),
        dense_bytes=max(0, plan.dense_bytes - lie),
        max_bytes=1 << 40,
        writing=lambda: None,
    )
    if plan.nnz:
        with pytest.raises(LimitExceeded, match=r"layers\.\d\.weight: "):
            receiver.bring(plan, room)
    assert equal(receiver.live, before)


# Writes that do not stick


@dataclass
class Faulty:
    """A parameter of which one element keeps its old bits whatever is written."""

    flat: Flat
    stuck: int
    times: int = 1 << 30

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flat, name)

    def _write(self, write: Any, *arguments: Any) -> None:
        old = self.flat.read(self.stuck, self.stuck + 1).clone()
        write(*arguments)
        if self.times > 0:
            self.flat.write(self.stuck, old)
        self.times -= 1

    def write(self, start: int, bits: Tensor) -> None:
        self._write(self.flat.write, start, bits)

    def scatter(self, positions: Tensor, bits: Tensor) -> None:
        self._write(self.flat.scatter, positions, bits)


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
    "sparse": Run(0, 10, indices(1, 4), torch.ones(2, dtype=torch.int16)),
    "dense": Run(2, 6, None, torch.ones(6, dtype=torch.int16)),
}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())


@pytest.mark.promise(
    "Checks",
    "What is written is read back; a write that does not persist is an error.",
)
@every_run
@pytest.mark.parametrize("layout", ["contiguous", "stepped"])
def test_a_write_that_does_not_stick_is_an_error(run: Run, layout: own.Layout) -> None:
    live = relaid(torch.zeros(10, dtype=torch.int16), layout)
    ledger = digests_of({"w": live}, 4, [0])
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


@every_run
def test_an_undo_that_does_not_stick_is_an_error(run: Run) -> None:
    live = torch.zeros(10, dtype=torch.int16)
    lines, broken = faulty(live, stuck=4, times=0)
    ledger = digests_of({"w": live}, 4, [0])
    staging = Staging(lines, ledger)
    stage_runs(staging, [(0, run)], ledger.specs)
    staging.commit()
    broken.times = 2  # a dense run is put back by chunks, the stuck element with the second
    with pytest.raises(DigestMismatch, match="w: undo failed"):
        staging.undo()


def test_undo_after_a_write_that_raised_restores_what_was_written() -> None:
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    flats = [Flat.of(tensor) for tensor in live.values()]
    broken = cast("Any", Faulty(flats[1], stuck=0, times=0))
    ledger = digests_of(live, 4, [0, 1])
    staging = Staging(Lines({0: flats[0], 1: broken}, 2), ledger)
    ones = torch.ones(4, dtype=torch.int32)
    stage_runs(staging, [(n, Run(0, 4, None, ones)) for n in (0, 1)], ledger.specs)
    broken.write = broken.scatter = None  # the first write of "b" raises
    with pytest.raises(TypeError):
        staging.commit()
    assert live["a"].any()
    del broken.write, broken.scatter
    staging.undo()
    assert not any(tensor.any() for tensor in live.values())
