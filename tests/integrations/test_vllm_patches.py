"""What is exported for vLLM's own sparse transfer says the same as the patch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import Chunk, ChunkedPatch, Policy, SparsePatch, diff
from deltasync.errors import ConfigError
from deltasync.integrations.vllm_patches import to_vllm_patches
from tests.strategies import same_bits


@given(
    numel=st.integers(1, 60),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 99),
    chunk_numel=st.integers(1, 70),
    dense_above=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_written_where_it_says_it_makes_the_new_weights(
    numel: int, share: float, seed: int, chunk_numel: int, dense_above: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, numel, generator=generator).bfloat16()
    chosen = torch.rand(base.shape, generator=generator) < share
    wanted = torch.where(chosen, -base, base)
    policy = Policy(chunk_numel=chunk_numel, dense_above=dense_above)
    patch = diff(wanted, base, name="w", policy=policy)
    for one in to_vllm_patches([patch] if patch is not None else []):
        assert (one.name, one.full_shape, one.indices.dtype) == ("w", base.shape, torch.int32)
        assert (one.indices.diff() > 0).all()
        base.view(-1)[one.indices.long()] = one.values
    assert same_bits(base, wanted)


def sparse(values: Tensor) -> SparsePatch:
    indices = torch.arange(len(values), dtype=torch.int32)
    return SparsePatch(name="w", shape=(8,), indices=indices, values=values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_weight_that_became_nan_is_refused(dtype: torch.dtype) -> None:
    """vLLM would leave it as it is and say nothing."""
    values = torch.tensor([1.0, torch.nan]).to(dtype)
    with pytest.raises(ConfigError, match="w: vLLM's patches hold floating values other than NaN"):
        list(to_vllm_patches([sparse(values)]))
    with pytest.raises(ConfigError, match="w: vLLM's patches hold floating"):
        list(to_vllm_patches([sparse(torch.ones(2, dtype=torch.int8))]))


def test_positions_beyond_int32_are_refused() -> None:
    chunk = Chunk(start=1 << 31, numel=1, indices=None, values=torch.ones(1))
    patch = ChunkedPatch(name="w", shape=(1 << 16, 1 << 16), chunks=(chunk,))
    with pytest.raises(ConfigError, match="w: 4294967296 elements are too many"):
        list(to_vllm_patches([patch]))
