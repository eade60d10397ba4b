"""Between two tensors: `diff` finds the patch that makes one the other, `apply_patch` writes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, as_bits, dtype_of
from deltasync.delta.kernels import KERNELS
from deltasync.delta.patch import (
    CHUNK_NUMEL,
    INDEX_BYTES,
    MAX_SPARSE_SPAN,
    Chunk,
    Patch,
    check_patch,
    patch_of,
    write_chunk,
)
from deltasync.delta.readers import WireReader
from deltasync.errors import LayoutMismatch


def diff(old: Tensor, new: Tensor, *, name: str = "") -> Patch | None:
    """The patch that makes `old` bit-identical to `new`, or None if it is already.

    It is dense where indices and values would take more bytes than all elements.

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
    chunks = _merged([*_changed(reader, held)], old.numel())
    return patch_of(name, tuple(old.shape), chunks) if chunks else None


def _changed(reader: WireReader, held: Flat) -> Iterator[Chunk]:
    """Each chunk that differs, in order."""
    changed, size = KERNELS[held.line.device.type].changed, held.dtype.item_size
    for start in range(0, held.numel, CHUNK_NUMEL):
        numel = min(CHUNK_NUMEL, held.numel - start)
        new = reader.read(start, start + numel)
        most = numel * size // (INDEX_BYTES + size)
        indices = changed(new, held.read(start, start + numel), most)
        if indices is None or len(indices):
            bits = new.clone() if indices is None else new.index_select(0, indices)
            values = bits.view(held.tensor.dtype)
            yield Chunk(start=start, numel=numel, indices=indices, values=values)


def _merged(chunks: list[Chunk], numel: int) -> list[Chunk]:
    """One for the whole parameter, where all its chunks are sparse or all are dense."""
    num_sparse = sum(chunk.indices is not None for chunk in chunks)
    if not chunks or (num_sparse and (num_sparse < len(chunks) or numel > MAX_SPARSE_SPAN)):
        return chunks
    sparse = [chunk.indices + chunk.start for chunk in chunks if chunk.indices is not None]
    if not sparse and sum(chunk.numel for chunk in chunks) < numel:
        return chunks
    bits = torch.cat([as_bits(chunk.values) for chunk in chunks])
    values, indices = bits.view(chunks[0].values.dtype), torch.cat(sparse) if sparse else None
    return [Chunk(start=0, numel=numel, indices=indices, values=values)]


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
    check_patch(patch, parameter)
    for chunk in patch.chunks:
        write_chunk(chunk, flat)
