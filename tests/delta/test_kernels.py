"""Kernel modules give the same answers; what they digest is in tests/wire/test_digest.py."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.kernels import host, reference

INTEGERS = st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64])


def random_integers(dtype: torch.dtype, n: int, rng: np.random.Generator) -> Tensor:
    noise = rng.integers(0, 256, (n + 1) * dtype.itemsize, np.uint8)
    return torch.from_numpy(noise).view(dtype)[:n]


@given(
    dtype=INTEGERS,
    numel=st.integers(0, 70) | st.just((1 << 18) + 5),
    density=st.sampled_from([0, 1e-4, 0.01, 0.9]),
    offset=st.integers(0, 2),
    start=st.sampled_from([0, (1 << 31) - 3, 1 << 40]),
    seed=st.integers(0, 1 << 32),
)
def test_kernels_agree_on_runs(
    dtype: torch.dtype, numel: int, density: float, offset: int, start: int, seed: int
) -> None:
    """Wherever these lie, with any density of what changed."""
    rng = np.random.default_rng(seed)
    old = random_integers(dtype, numel + offset, rng)[offset:]
    new, mask = old.clone(), rng.random(numel) < density
    new[torch.from_numpy(mask)] ^= 1
    assert np.array_equal(host.changed(new, old).numpy(), np.flatnonzero(mask))
    assert host.digest_run(old, seed, start) == reference.digest_run(old, seed, start)
