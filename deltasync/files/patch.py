"""Between two tensors: `diff` finds the patch that makes one the other, `apply_patch` writes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, as_bits, dtype_of
from deltasync.delta.kernels.host import changed
from deltasync.delta.readers import WireReader, copy_read
from deltasync.errors import InvalidIndices, LayoutMismatch

CHUNK_NUMEL = 1 << 18
"""Elements that are compared at once."""

_MOST_NUMEL = (1 << 31) - 1  # of a parameter whose positions are int32
_BLOCK = 1 << 17  # indices widened at once: still in the cache when used, and few calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """New values for elements of one parameter.

    Attributes:
        name: Checkpoint name of the parameter.
        shape: Its full checkpoint shape.
        indices: int[nnz], strictly increasing flat row-major positions: int32, or int64 for a
            parameter of 2^31 elements or more. None if all elements are written.
        values: dtype[nnz], the new values themselves, bit for bit. A new value may be 0.
    """

    name: str
    shape: tuple[int, ...]
    indices: Tensor | None
    values: Tensor

    @property
    def nnz(self) -> int:
        """Written elements."""
        return len(self.values)


def diff(old: Tensor, new: Tensor, *, name: str = "") -> Patch | None:
    """The patch that makes `old` bit-identical to `new`, or None if it is already.

    It has all elements where indices and values would take more bytes.

    Args:
        old: What the receiver holds.
        new: The parameter, of the same shape and device; of `old`'s dtype or of another floating
            dtype, which is then rounded to `old`'s. Any strides.
        name: Checkpoint name to put into the patch.

    Raises:
        LayoutMismatch: The shapes differ.
        ConfigError: The dtypes cannot be compared, or a tensor has no plain storage.
    """
    if new.shape != old.shape:
        raise LayoutMismatch(f"{name}: shape {tuple(new.shape)} against {tuple(old.shape)}")
    reader, held = WireReader.of(new, dtype_of(old), name=name), Flat.of(old, name=name)
    size, shape = held.dtype.item_size, tuple(old.shape)
    kind = torch.int32 if held.numel <= _MOST_NUMEL else torch.int64
    most = held.numel * size // (kind.itemsize + size)
    indices, values = list[Tensor](), list[Tensor]()
    for start in range(0, held.numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, held.numel)
        bits = reader.read(start, stop)
        found = changed(bits, held.read(start, stop))
        most -= len(found)
        if most < 0:
            return Patch(name=name, shape=shape, indices=None, values=_all(reader, old))
        if len(found):
            values.append(bits.index_select(0, found))
            indices.append(found.to(kind) + start)
    if not indices:
        return None
    bits = torch.cat(values).view(old.dtype)
    return Patch(name=name, shape=shape, indices=torch.cat(indices), values=bits)


def _all(reader: WireReader, like: Tensor) -> Tensor:
    """All that a reader reads, in memory of its own."""
    values = torch.empty(reader.numel, dtype=like.dtype, device=like.device)
    copy_read(reader, Flat.of(values), step=CHUNK_NUMEL)
    return values


def apply_patch(parameter: Tensor, patch: Patch) -> None:
    """Overwrite what the patch says of `parameter`, in place. Applying twice equals once.

    Args:
        parameter: The tensor to write, of any strides, on the patch's device.
        patch: The new values; they are checked before the first write.

    Raises:
        LayoutMismatch: Shape or dtype differ from the patch's.
        InvalidIndices: Indices out of range, unsorted or repeated.
        ConfigError: The tensor has no plain storage of its own.
    """
    flat = Flat.of(parameter, name=patch.name)
    _check(patch, parameter)
    bits, device = as_bits(patch.values), flat.line.device
    for begin in range(0, len(bits), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        if patch.indices is None:
            flat.write(begin, bits[block])
        else:
            flat.scatter(patch.indices[block].to(device, torch.int64), bits[block].to(device))


def _check(patch: Patch, parameter: Tensor) -> None:
    """Raises LayoutMismatch unless a patch is of such a parameter.

    Raises InvalidIndices unless it has a value for each index.
    """
    name, given, count = patch.name, patch.indices, parameter.numel()
    if tuple(parameter.shape) != tuple(patch.shape):
        raise LayoutMismatch(
            f"{name}: patch of shape {patch.shape}, parameter {tuple(parameter.shape)}"
        )
    if patch.values.dtype != parameter.dtype:
        raise LayoutMismatch(f"{name}: {patch.values.dtype} values, {parameter.dtype} weights")
    if given is not None and (given.dtype not in (torch.int32, torch.int64) or given.dim() != 1):
        raise InvalidIndices(f"{name}: indices are {given.dtype}{[*given.shape]}, not int[n]")
    if patch.values.shape != (count if given is None else len(given),):
        raise InvalidIndices(f"{name}: not one value for each index")
    if given is None or not len(given):
        return
    if given[0] < 0 or given[-1] >= count or not (given[1:] > given[:-1]).all():
        raise InvalidIndices(f"{name}: indices out of range, unsorted or repeated")
