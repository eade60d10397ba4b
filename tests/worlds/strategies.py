"""Hypothesis strategies for tensors of every dtype, layout and bit pattern that can be sent.

Elements are drawn as bits and tensors are compared as bits (`same_bits`): a float comparison
calls -0.0 and 0.0 equal and finds every NaN changed.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import as_bits, torch_dtype
from deltasync.dtypes import Dtype
from tests.worlds.bits import flipped, random_bits

Layout = Literal["contiguous", "permuted", "stepped", "offset"]

DTYPES: SearchStrategy[Dtype] = st.sampled_from(dtypes.DTYPES)
SEEDS: SearchStrategy[int] = st.integers(0, (1 << 32) - 1)
SHAPES: SearchStrategy[tuple[int, ...]] = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (1, 1)]),
    st.integers(2, 100).map(lambda n: (n,)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
LAYOUTS: SearchStrategy[Layout] = st.sampled_from(["contiguous", "permuted", "stepped", "offset"])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether shape, dtype and every bit agree; strides may differ."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(as_bits(left), as_bits(right))


def laid_out(bits: Tensor, layout: Layout) -> Tensor:
    """`bits`, copied into storage of their own that is laid out as asked."""
    match layout:
        case "contiguous":
            return bits.clone(memory_format=torch.contiguous_format)
        case "permuted":
            order = list(reversed(range(bits.dim())))
            return bits.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
        case "stepped":
            storage = torch.full([2 * n + 1 for n in bits.shape], 0x5A, dtype=bits.dtype)
            view = storage[tuple(slice(1, None, 2) for _ in bits.shape)]
        case "offset":
            storage = torch.full((bits.numel() + 7,), 0x5A, dtype=bits.dtype)
            view = storage[3 : 3 + bits.numel()].view(bits.shape)
    return view.copy_(bits)


def relaid(tensor: Tensor, layout: Layout) -> Tensor:
    """The same elements in storage of their own that is laid out as asked."""
    return laid_out(as_bits(tensor), layout).view(tensor.dtype)


@st.composite
def tensors(
    draw: DrawFn,
    *,
    dtypes: SearchStrategy[Dtype] = DTYPES,
    shapes: SearchStrategy[tuple[int, ...]] = SHAPES,
    layouts: SearchStrategy[Layout] = LAYOUTS,
) -> Tensor:
    """Tensors with adversarial bits: NaN payloads, -0.0, denormals, infinities, noise."""
    dtype, shape = draw(dtypes), draw(shapes)
    bits = random_bits(dtype, math.prod(shape), np.random.default_rng(draw(SEEDS)))
    return laid_out(bits.view(shape), draw(layouts)).view(torch_dtype(dtype))


@st.composite
def mutations(draw: DrawFn, tensor: Tensor, *, layouts: SearchStrategy[Layout] = LAYOUTS) -> Tensor:
    """Copies of `tensor` of which none, one, some or all elements have other bits."""
    numel = tensor.numel()
    rng = np.random.default_rng(draw(SEEDS))
    share = draw(st.sampled_from(["none", "one", "few", "half", "all"]))
    density = {"few": 0.05, "half": 0.5, "all": 1.0}.get(share, 0.0)
    mask = rng.random(numel) < density
    if share == "one" and numel:
        mask[rng.integers(numel)] = True
    return laid_out(flipped(tensor, mask, rng), draw(layouts)).view(tensor.dtype)


@st.composite
def pairs(
    draw: DrawFn,
    *,
    dtypes: SearchStrategy[Dtype] = DTYPES,
    shapes: SearchStrategy[tuple[int, ...]] = SHAPES,
) -> tuple[Tensor, Tensor]:
    """(new, base): two versions of one parameter, each in a layout of its own."""
    base = draw(tensors(dtypes=dtypes, shapes=shapes))
    return draw(mutations(base)), base


@st.composite
def models(
    draw: DrawFn,
    *,
    max_parameters: int = 5,
    shapes: SearchStrategy[tuple[int, ...]] = SHAPES,
) -> dict[str, Tensor]:
    """Named tensors of mixed dtypes, shapes and layouts."""
    drawn = draw(st.lists(tensors(shapes=shapes), min_size=1, max_size=max_parameters))
    return {f"layers.{number}.weight": tensor for number, tensor in enumerate(drawn)}
