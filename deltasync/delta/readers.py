"""What gives the elements that are sent of one parameter, in the dtype that they are sent in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live, as_bits, torch_dtype
from deltasync.delta.tiles import Ints
from deltasync.dtypes import Dtype
from deltasync.errors import ConfigError


class Reader(Protocol):
    """Reads what is sent of a parameter as the bits of its wire dtype.

    Attributes:
        dtype: The wire dtype.
        flat: The elements themselves, if they are sent as they are, or rounded. None if what is
            sent is computed from other tensors.
        computation: How kernels compute it; None if they do not.
    """

    @property
    def dtype(self) -> Dtype: ...

    @property
    def flat(self) -> Flat | None: ...

    @property
    def computation(self) -> Computation | None: ...

    @property
    def numel(self) -> int:
        """Elements that are sent."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are read."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """int[stop - start]: the bits there, on `device`; read only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """How kernels compute what a reader reads: `deltasync.quant` has one.

    Attributes:
        is_codes: Whether they compute codes; otherwise, scales.
        address: Of the weights that codes are computed from.
        read: A number for each way to read codes; at least `kernels.reads.COMPUTED`.
        source_bytes: Of the weights that one element is computed from.
    """

    is_codes: bool
    address: int
    read: int
    source_bytes: int

    def has_kernels(self, device: torch.device) -> bool:
        """Whether kernels compute codes of it on `device`."""
        raise NotImplementedError

    def together(self, codes: Mapping[int, Any], device: torch.device) -> Masks:
        """All codes that a source has, by share, this one among them."""
        raise NotImplementedError


class Masks(Protocol):
    """What kernels compute of one source: codes, and masks of those that differ.

    Attributes:
        codes_at: A Triton function `(address, offsets, mask, start, numbers, TYPE, READ)` that
            reads codes: see `deltasync.quant.triton_forms`.
    """

    codes_at: Any

    def source_of(self, computation: Any) -> tuple[int, bool] | None:
        """(address, whether it is float32) of scales; None if kernels do not compute them."""
        ...

    def compare(self, words: Tensor) -> None:
        """Compute all scales, and write masks of the codes that differ to int32[...] words."""
        ...

    def columns(self, num_shares: int) -> Ints:
        """int64[shares, 3]: what `codes_at` needs to know of each."""
        ...

    def place(self, reads_of: Ints, at: Ints, first_word: Ints) -> None:
        """Take note of what codes are compared with.

        Args:
            reads_of: int64[shares], how kernels read them.
            at: int64[shares], addresses of what they are compared with.
            first_word: int64[shares], where their masks begin.
        """
        ...


def copy_read(reader: Reader, flat: Live, *, step: int) -> None:
    """Write all that a reader reads to `flat`, `step` elements at once."""
    for start in range(0, reader.numel, step):
        flat.write(start, reader.read(start, min(start + step, reader.numel)))


@dataclass(frozen=True, slots=True)
class WireReader:
    """Reads a source tensor as the bits of its wire dtype, rounding where that is narrower.

    A NaN that changes its dtype loses its payload.
    """

    flat: Flat
    dtype: Dtype
    numel: int
    device: torch.device
    computation: None = None

    @classmethod
    def of(cls, tensor: Tensor, dtype: Dtype, *, name: str) -> WireReader:
        """Raises ConfigError when the source's dtype cannot be told as `dtype`."""
        flat = Flat.of(tensor, name=name)
        if flat.dtype != dtype and not (flat.dtype.is_floating and dtype.is_floating):
            raise ConfigError(f"{name}: {flat.dtype.name} cannot be sent as {dtype.name}")
        return cls(flat, dtype, flat.numel, flat.line.device)

    def read(self, start: int, stop: int) -> Tensor:
        """int[stop - start]: bits of the wire dtype there; read only."""
        bits = self.flat.read(start, stop)
        if self.flat.dtype == self.dtype:
            return bits
        return _rounded(bits.view(self.flat.tensor.dtype), torch_dtype(self.dtype))


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """int[n]: the bits of floating `values` in another floating dtype, and one NaN for all NaNs.

    Which NaN torch makes of a NaN depends on how the vector loop falls over the tensor, so that
    another slice of the same weights would have other bits.
    """
    bits = as_bits(values.to(dtype))
    # A sum costs a tenth of isnan; no sum of one-byte floats exists.
    if values.element_size() == 1 or values.sum().isnan():
        nan = torch.full((1,), torch.nan, dtype=dtype, device=values.device)
        bits = torch.where(values.isnan(), as_bits(nan), bits)
    return bits
