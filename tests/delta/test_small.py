"""Small tensors that are read side by side: the same changes and digests as one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.backend import snapshot_of
from deltasync.delta.bits import Flat, as_bits, torch_dtype
from deltasync.delta.digests import DigestLedger
from deltasync.delta.host import backend, small
from deltasync.delta.host.backend import DeltaPlan, HostBackend
from deltasync.delta.policy import Policy
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.shard import whole
from deltasync.testing.bits import specs_of
from tests.worlds import strategies as own


@pytest.fixture(scope="module", autouse=True)
def _together_however_few() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_MANY", 0)
        yield


WIRE = {"float32": "bfloat16", "float64": "float32"}
"""Masters, and what is sent of them."""


def readers_of(model: dict[str, Tensor], *, is_rounded: bool) -> list[Reader]:
    sent = {spec.name: spec.dtype for spec in specs_of(model)}
    if is_rounded:
        sent = {n: dtypes.BY_NAME[WIRE.get(d.name, d.name)] for n, d in sent.items()}
    return [WireReader.of(tensor, sent[name], name=name) for name, tensor in model.items()]


def snapshot(model: dict[str, Tensor], readers: Sequence[Reader]) -> HostBackend:
    taken = snapshot_of(whole(specs_of(model)), readers, chunk_numel=1 << 18)
    assert isinstance(taken, HostBackend)
    return taken


def compared(backend: HostBackend, readers: Sequence[Reader]) -> DeltaPlan:
    return backend.compare(
        readers, policy=Policy(), bucket_bytes=1 << 20, max_held_bytes=1 << 30, base_version=0
    )


def sent(plan: DeltaPlan) -> list[object]:
    """What a plan sends; the snapshot takes it."""
    found: list[object] = [plan.ledger.sums.tolist()]
    for number, run in plan.runs():
        bits = plan.read(number, run.start, run.stop) if run.bits is None else run.bits
        indices = None if run.indices is None else run.indices.tolist()
        found.append((number, run.start, run.span, indices, bits.tolist()))
        plan.packed(number, run, bits)
    plan.decided()
    return found


@given(
    model=own.models(),
    data=st.data(),
    is_rounded=st.booleans(),
    together=st.sampled_from([1, 50, 1 << 15]),
)
def test_side_by_side_finds_what_one_by_one_finds(
    model: dict[str, Tensor], data: st.DataObject, is_rounded: bool, together: int
) -> None:
    readers = readers_of(model, is_rounded=is_rounded)
    backend, other = snapshot(model, readers), snapshot(model, readers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "_TOGETHER", together)
        patch.setattr(small, "SMALL", data.draw(st.sampled_from([8, 1 << 12])))
        for _ in range(3):
            assert not compared(backend, readers).changes
            for tensor in model.values():
                changed = data.draw(own.mutations(tensor))
                Flat.of(tensor).write(0, Flat.of(changed).read(0, tensor.numel()))
            one_by_one = compared(other, list(readers))  # another list each time
            assert sent(compared(backend, readers)) == sent(one_by_one)


@given(model=own.models(), data=st.data())
def test_digests_side_by_side_are_those_of_each(
    model: dict[str, Tensor], data: st.DataObject
) -> None:
    flats = {number: Flat.of(tensor) for number, tensor in enumerate(model.values())}
    held = data.draw(st.sets(st.sampled_from(sorted(flats)))) if flats else set()
    ledger = DigestLedger(whole(specs_of(model)), chunk_numel=16, held=held)
    measured = HostBackend({n: flats[n] for n in held}, ledger).measure(np.arange(len(ledger.sums)))
    for number in held:
        ledger.measure(number, flats[number].read)
    assert np.array_equal(measured, ledger.sums)


def test_what_an_aborted_sync_overwrote_is_looked_at() -> None:
    model = {f"w{n}": torch.zeros(8, dtype=torch.int16) for n in range(4)}
    readers = readers_of(model, is_rounded=False)
    backend = snapshot(model, readers)
    compared(backend, readers)
    backend.ahead.add(2)
    assert compared(backend, readers).changed.tolist() == [2]


def test_many_parameters_of_odd_sizes_in_several_groups() -> None:
    model = {f"w{n}": torch.full((1 + n % 77,), n % 5, dtype=torch.int8) for n in range(2000)}
    model |= {f"f{n}": torch.randn(1 + n % 9) for n in range(100)}
    readers = readers_of(model, is_rounded=True)
    backend = snapshot(model, readers)
    assert not compared(backend, readers).changes
    assert not compared(backend, readers).changes
    changed = [0, 5, 76, 77, 1000, 1999, 2003, 2099]
    for number in changed:
        as_bits(list(model.values())[number])[-1] ^= -0x80 if number < 2000 else 1 << 20
    assert compared(backend, readers).changed.tolist() == changed
    assert torch_dtype(readers[2003].dtype) == torch.bfloat16
