"""Matrices that are sent quantized: one kernel reads, quantizes and compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltasync.delta.batched.weights import BatchedWeights, upload
from deltasync.delta.bits import Computation
from deltasync.delta.digests import Ints, cut
from deltasync.delta.kernels import reads, triton_forms
from deltasync.delta.kernels.triton import BLOCK

WORD = 32  # columns whose masks are one word
_SIDE = 128
_CONVERTS = (8, 9)  # compute capability of the first GPUs that convert to FP8 themselves


def read_as(computation: Computation) -> int:
    """What kernels do to read a matrix as its codes."""
    weight = computation.weight
    is_native = (
        weight.line.is_cuda and torch.cuda.get_device_capability(weight.line.device) >= _CONVERTS
    )
    read = reads.BLOCK_FP8 | (reads.NATIVE if is_native else 0)
    return read | (reads.WIDE if weight.tensor.dtype == torch.float32 else 0)


def scales_of(quantized: Mapping[int, Computation], num_parameters: int) -> Ints:
    """int64[2, parameters]: addresses of the scales of matrices, and their columns."""
    columns = np.stack([np.zeros(num_parameters, np.int64), np.ones(num_parameters, np.int64)])
    for parameter, computation in quantized.items():
        columns[:, parameter] = computation.scales.line.data_ptr(), computation.shape[1]
    return columns


@dataclass(frozen=True, slots=True)
class Matrices:
    """Those that one launch compares.

    Attributes:
        read: How their weights are read.
        is_ue8m0: Whether scales are powers of two.
        table: int64[7, matrices] on the device, see `triton_forms.compare_block_fp8`.
        matrix_of: int32[blocks] on the device: the matrix of each block of 128 x 128.
    """

    read: int
    is_ue8m0: bool
    table: Tensor
    matrix_of: Tensor

    def compare(self, words: Tensor) -> None:
        """Compute all scales, and write masks of the codes that differ to int32[...] words."""
        triton_forms.compare_block_fp8[(len(self.matrix_of),)](
            self.table,
            self.matrix_of,
            words,
            self.table.shape[1],
            WIDE=bool(self.read & reads.WIDE),
            UE8M0=self.is_ue8m0,
            NATIVE=bool(self.read & reads.NATIVE),
            num_warps=8,
        )


def matrices_of(
    quantized: Mapping[int, Computation],
    reads_of: Ints,
    snapshot: BatchedWeights,
    first_block: Ints,
) -> list[Matrices]:
    """Matrices by what kernels do with them.

    Args:
        quantized: How codes are computed, by parameter.
        reads_of: int64[parameters], how kernels read them.
        snapshot: What they are compared with.
        first_block: int64[chunks], the first block of masks of each.
    """
    kinds: dict[tuple[int, bool], list[int]] = {}
    for parameter, computation in quantized.items():
        kind = int(reads_of[parameter]), computation.is_ue8m0
        kinds.setdefault(kind, []).append(parameter)
    return [
        _launch(read, is_ue8m0, {p: quantized[p] for p in here}, snapshot, first_block)
        for (read, is_ue8m0), here in kinds.items()
    ]


def _launch(
    read: int,
    is_ue8m0: bool,
    quantized: Mapping[int, Computation],
    snapshot: BatchedWeights,
    first_block: Ints,
) -> Matrices:
    weights = [computation.weight for computation in quantized.values()]
    shapes = np.array([one.shape for one in quantized.values()], np.int64).T
    blocks = np.prod(-(-shapes // _SIDE), axis=0)
    parameters = np.array(list(quantized), np.int64)
    table = np.stack(
        [
            np.array([weight.line.data_ptr() for weight in weights], np.int64),
            snapshot.pointers[parameters],
            np.array([one.scales.line.data_ptr() for one in quantized.values()], np.int64),
            *shapes,
            first_block[snapshot.ledger.first[parameters]] * (BLOCK // WORD),
            np.cumsum(blocks) - blocks,
        ]
    )
    matrix_of, _ = cut(blocks, 1)
    there, of = upload([table, matrix_of], snapshot.device)
    return Matrices(read, is_ue8m0, there, of.to(torch.int32))
