"""What kernels are told of matrices that are sent quantized, and of the forms that these have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from deltasync.delta import readers
from deltasync.delta.bits import Flat
from deltasync.quant import reads

if TYPE_CHECKING:  # imports Triton, which may be absent
    from deltasync.quant.batched import Quantized

Block = tuple[int | None, int | None]
"""Rows and columns that have a scale together; None for all of them."""


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A form as kernels compute it. Equal ones are compiled once.

    Attributes:
        number: One of the forms of `kernels.reads`.
        block: What has a scale.
        codes, scales: The parts that are codes, and scales of blocks.
        total: The part that is a scale of whole matrices.
        total_of: float32 [n], the totals where bfloat16 [n] are the largest magnitudes of all
            matrices that share one.
    """

    number: int
    block: Block
    codes: str = "weight"
    scales: str | None = "weight_scale"
    total: str | None = None
    total_of: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """A scale of whole matrices.

    Attributes:
        weights: float32 or bfloat16, all matrices that share it. Not owned.
    """

    weights: Sequence[Flat]


@dataclass(frozen=True, slots=True)
class Computation(readers.Computation):
    """How kernels compute what is sent of a matrix.

    Attributes:
        weight: float32 or bfloat16, the elements of the matrix. Not owned.
        shape: (rows, cols) of the matrix.
        form: What is done with them.
        part: What is sent.
        scales: Of blocks, float32 or in the dtype of the part, which a comparison of the codes
            overwrites; None without blocks. Owned by whoever computes the codes.
        total: The scale of the whole; None if there is none.
    """

    weight: Flat
    shape: tuple[int, int]
    form: KernelForm
    part: Literal["codes", "scales", "total"]
    scales: Flat | None
    total: Total | None

    @classmethod
    def of(
        cls,
        weight: Flat,
        shape: tuple[int, int],
        form: KernelForm,
        *,
        part: Literal["codes", "scales", "total"],
        scales: Flat | None,
        total: Total | None,
    ) -> Computation:
        """What kernels are told follows from the rest."""
        size = weight.dtype.item_size
        return cls(
            *(weight, shape, form, part, scales, total),
            is_codes=part == "codes",
            address=weight.line.data_ptr(),
            read=form.number * reads.FORM + (size == 4) * reads.WIDE,
            source_bytes=reads.codes_of(form.number) * size,
        )

    def has_kernels(self, device: torch.device) -> bool:
        from deltasync.quant.batched import can_compute

        return can_compute(self, device)

    def together(self, codes: Mapping[int, Computation], device: torch.device) -> Quantized:
        from deltasync.quant.batched import Quantized

        return Quantized(codes, device)
