"""`diff` and `apply_patch`: what a patch says, and what it may be applied to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import as_bits, dtype_of
from deltasync.errors import ConfigError, InvalidIndices, LayoutMismatch
from deltasync.files.patch import CHUNK_NUMEL, Patch, apply_patch, diff
from tests.worlds import strategies as own
from tests.worlds.strategies import relaid, same_bits

LARGE = st.sampled_from([(CHUNK_NUMEL,), (CHUNK_NUMEL + 5,), (2, CHUNK_NUMEL + 3)])
CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float8_e8m0fnu),
    (torch.float8_e5m2, torch.bfloat16),
]


@pytest.mark.promise("Bits", "-0.0, NaN payloads, denormals and every dtype arrive as they are.")
@given(pair=own.pairs() | own.pairs(shapes=LARGE), layout=own.LAYOUTS)
def test_applying_the_diff_gives_the_new_bits(
    pair: tuple[Tensor, Tensor], layout: own.Layout
) -> None:
    new, base = pair
    patch = diff(base, new, name="w")
    assert (patch is None) == same_bits(new, base)
    live = relaid(base, layout)
    for _ in range(2):  # values are absolute: twice equals once
        if patch is not None:
            apply_patch(live, patch)
        assert same_bits(live, new)


def test_a_patch_that_takes_as_much_both_ways_is_sparse() -> None:
    base, new = torch.zeros(3, dtype=torch.bfloat16), torch.tensor([0.0, 1.0, 0.0]).bfloat16()
    few, many = diff(base, new), diff(base, new + 1)
    assert few is not None
    assert few.indices is not None
    assert few.indices.tolist() == [1]
    assert many is not None
    assert many.indices is None
    assert many.nnz == 3


@pytest.mark.parametrize("same", [0, CHUNK_NUMEL + 8], ids=["dense", "sparse"])
def test_patch_does_not_alias_the_source(same: int) -> None:
    base = torch.zeros(CHUNK_NUMEL + same)
    new = base.clone()
    new[:CHUNK_NUMEL] = 1
    patch = diff(base, new)
    new.fill_(7)
    assert patch is not None
    assert (patch.indices is None) == (not same)
    assert len(patch.values) == CHUNK_NUMEL
    assert (patch.values == 1).all()


@pytest.mark.promise("Bits", "float32 masters are compared as torch casts them.")
@given(data=st.data(), cast=st.sampled_from(CASTS))
def test_masters_are_compared_as_torch_casts_them(
    data: st.DataObject, cast: tuple[torch.dtype, torch.dtype]
) -> None:
    master, wire = cast
    new = data.draw(own.tensors(dtypes=st.just(dtype_of(torch.empty(0, dtype=master)))))
    nan = as_bits(torch.full((), torch.nan, dtype=wire))
    expected = torch.where(new.isnan(), nan, as_bits(new.contiguous().to(wire))).view(wire)
    base = torch.zeros(new.shape, dtype=wire)
    patch = diff(base, new)
    if patch is not None:
        apply_patch(base, patch)
    assert same_bits(base, expected)
    assert diff(base, new) is None


def test_a_long_patch_is_written_whole_and_autograd_learns_of_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 19))
    loss = (weight * weight).sum()
    indices = torch.arange(0, 1 << 19, 2, dtype=torch.int32)  # several blocks
    values = torch.arange(1.0, len(indices) + 1)
    shape = tuple(weight.shape)
    apply_patch(weight, Patch(name="w", shape=shape, indices=indices, values=values))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight[::2], values)
    assert not weight[1::2].any()


def sparse(
    indices: list[int], *, values: int | None = None, shape: tuple[int, ...] = (10,)
) -> Patch:
    filled = torch.ones(len(indices) if values is None else values)
    return Patch(
        name="w", shape=shape, indices=torch.tensor(indices, dtype=torch.int32), values=filled
    )


def dense(num: int, *, shape: tuple[int, ...] = (10,)) -> Patch:
    return Patch(name="w", shape=shape, indices=None, values=torch.ones(num))


BAD_INDICES = {
    "beyond the end": sparse([0, 10]),
    "negative": sparse([-1, 0]),
    "unsorted": sparse([3, 2]),
    "repeated": sparse([2, 2]),
    "too few values": sparse([1, 2], values=1),
    "of another dtype": replace(sparse([0, 2]), indices=torch.tensor([0.5, 2.5])),
    "not flat": replace(sparse([0, 2]), indices=torch.tensor([[0], [2]], dtype=torch.int32)),
    "dense, too few values": dense(9),
    "dense, too many values": dense(11),
    "dense, not flat": replace(dense(10), values=torch.ones(5, 2)),
}


@pytest.mark.parametrize("patch", BAD_INDICES.values(), ids=BAD_INDICES.keys())
@pytest.mark.parametrize("layout", ["contiguous", "stepped"])
def test_malformed_patch_writes_nothing(patch: Patch, layout: own.Layout) -> None:
    live = relaid(torch.zeros(10), layout)
    with pytest.raises(InvalidIndices, match="w: "):
        apply_patch(live, patch)
    assert same_bits(live, torch.zeros(10))


OTHERS = {
    "shape": torch.zeros(5, 2),
    "dtype": torch.zeros(10, dtype=torch.int32),
}


@pytest.mark.parametrize("live", OTHERS.values(), ids=OTHERS.keys())
def test_patch_of_another_parameter_is_refused(live: Tensor) -> None:
    for patch in (sparse([1]), dense(10)):
        with pytest.raises(LayoutMismatch, match="w: "):
            apply_patch(live, patch)
    assert same_bits(live, torch.zeros_like(live))
    with pytest.raises((LayoutMismatch, ConfigError), match="w: "):
        diff(torch.zeros(10), live, name="w")


UNPLAIN: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.zeros(1, 3).expand(4, 3),
    "meta": lambda: torch.zeros(4, 3, device="meta"),
    "sparse": lambda: torch.zeros(4, 3).to_sparse(),
    "conjugate": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj().imag,
    "complex128": lambda: torch.zeros(4, 3, dtype=torch.complex128),
}


@pytest.mark.parametrize("make", UNPLAIN.values(), ids=UNPLAIN.keys())
def test_tensor_without_plain_storage_of_its_own_is_refused(
    make: Callable[[], Tensor],
) -> None:
    strange = make()
    patch = dense(12, shape=(4, 3))
    with pytest.raises(ConfigError):
        apply_patch(strange, patch)
    with pytest.raises(ConfigError):
        diff(torch.zeros(4, 3), strange)


def test_positions_beyond_int32() -> None:
    """In memory that is there only where it is written."""
    numel = (1 << 31) + 5
    base, new = (torch.from_numpy(np.zeros(numel, np.uint8)) for _ in range(2))
    changed = [0, CHUNK_NUMEL, (1 << 31) - 1, 1 << 31, numel - 2, numel - 1]
    new[changed] = torch.arange(1, len(changed) + 1, dtype=torch.uint8)
    patch = diff(base, new)
    assert patch is not None
    assert patch.indices is not None
    assert patch.indices.dtype == torch.int64
    assert patch.indices.tolist() == changed
    strided = torch.from_numpy(np.zeros(2 * numel, np.uint8))[::2]
    for live in (base, strided):
        apply_patch(live, patch)
        assert live[changed].tolist() == list(range(1, len(changed) + 1))
    assert diff(base, new) is None
