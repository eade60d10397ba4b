"""The orders in which kernels of GPUs want codes of 4 bits, made in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unpacked(words: Tensor) -> Tensor:
    """Codes of int32[rows, words], as int32[rows, 8 * words]; the low ones first."""
    codes = words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32)
    return (codes & 15).flatten(1)


def packed(codes: Tensor) -> Tensor:
    """The words of int32[..., 8 * words] codes."""
    eight = codes.reshape(*codes.shape[:-1], -1, 8)
    return (eight << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def tiles_of_marlin(words: Tensor) -> Tensor:
    """The order of Marlin (github.com/IST-DASLab/marlin, README): tiles of 16 inputs x 64 outputs.

    A thread has two columns that are 8 apart, and of each the rows 2t, 2t + 1, 2t + 8 and 2t + 9;
    a word has all eight codes, even ones first.
    """
    by_input = unpacked(words).t()
    inputs, outputs = by_input.shape
    # high and low of the row, thread; block of 16 columns, half of it, column.
    tiles = by_input.reshape(inputs // 16, 2, 4, 2, outputs // 64, 4, 2, 8)
    return packed(tiles.permute(0, 4, 7, 2, 5, 3, 6, 1).reshape(inputs // 16, -1))


def tiles_like_machete(words: Tensor) -> Tensor:
    """Tiles of 32 inputs x 16 outputs, a thread's codes together, seen as the transposed matrix."""
    by_input = unpacked(words).t()
    inputs, outputs = by_input.shape
    tiles = by_input.reshape(inputs // 32, 2, 2, 4, 2, outputs // 16, 2, 8)
    return packed(tiles.permute(5, 0, 6, 7, 3, 4, 1, 2).reshape(outputs, inputs)).t()


def use_repacking() -> None:
    """Let vLLM repack codes without a GPU, for layers that load and do not run."""
    from vllm import _custom_ops as ops

    def repack(b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, **_: Any) -> Tensor:
        words = b_q_weight
        assert (len(words) * 8, words.shape[1], num_bits) == (size_k, size_n, 4)
        return tiles_of_marlin(_by_output(words))

    def repack_all(words: Tensor, *sizes: int, **options: Any) -> Tensor:
        return torch.stack([repack(one, *sizes, **options) for one in words])

    def prepack(words: Tensor, **_: Any) -> Tensor:
        return tiles_like_machete(_by_output(words))

    ops.gptq_marlin_repack, ops.gptq_marlin_moe_repack = repack, repack_all
    ops.machete_prepack_B = prepack


def _by_output(words: Tensor) -> Tensor:
    """Words of eight inputs, [inputs / 8, outputs], as compressed-tensors has them."""
    return words.t()
