"""Changes in the form that vLLM's own sparse transfer (`sparse_nccl`) takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.patch import ChunkedPatch, DensePatch, Patch, SparsePatch
from deltasync.errors import ConfigError

_MOST = 1 << 31  # elements that int32 indices can address


@dataclass(frozen=True, slots=True)
class VllmPatch:
    """The attributes of vLLM's `SparseWeightPatch`, without vLLM.

    Attributes:
        name: Checkpoint name of the parameter.
        indices: int32[nnz], increasing flat row-major positions.
        values: dtype[nnz], the new values.
        full_shape: Full checkpoint shape.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]


def to_vllm_patches(patches: Iterable[Patch]) -> Iterator[VllmPatch]:
    """Yield patches for vLLM's `SparseNCCLTrainerWeightTransferEngine.send_weights`.

    vLLM uses NaN for "unchanged", so a weight that has become NaN would not arrive.

    Args:
        patches: Patches of any kind, as `deltasync.diff` returns them.

    Raises:
        ConfigError: A new value is NaN, the dtype is not a floating one, or the parameter has more
            than 2^31 elements. The message names the parameter.
    """
    for patch in patches:
        numel, (indices, values) = math.prod(patch.shape), _flat(patch)
        if numel > _MOST:
            raise ConfigError(f"{patch.name}: {numel} elements are too many for int32 indices")
        if not values.is_floating_point() or values.to(torch.float32).isnan().any():
            raise ConfigError(f"{patch.name}: vLLM's patches hold floating values other than NaN")
        yield VllmPatch(patch.name, indices.to(torch.int32), values, patch.shape)


def _flat(patch: Patch) -> tuple[Tensor, Tensor]:
    """(positions, values) of everything that the patch writes."""
    match patch:
        case SparsePatch(indices=indices, values=values):
            return indices, values
        case DensePatch(values=values):
            return _range(0, values), values
        case ChunkedPatch(chunks=chunks):
            positions = [
                _range(c.start, c.values) if c.indices is None else c.indices.long() + c.start
                for c in chunks
            ]
            return torch.cat(positions), torch.cat([chunk.values for chunk in chunks])


def _range(start: int, values: Tensor) -> Tensor:
    return torch.arange(start, start + len(values), device=values.device)
