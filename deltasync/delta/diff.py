"""Between two tensors: `diff` finds the patch that makes one the other, `apply_patch` writes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Run, dtype_of
from deltasync.delta.kernels import KERNELS
from deltasync.delta.patch import (
    CHUNK_NUMEL,
    INDEX_BYTES,
    MAX_SPARSE_SPAN,
    Patch,
    check_runs,
    patch_from_runs,
    runs_of,
    values_of,
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
    runs = merged([*_changed_runs(reader, held)], old.numel())
    return patch_from_runs(name, tuple(old.shape), runs, old.dtype) if runs else None


def _changed_runs(reader: WireReader, held: Flat) -> Iterator[Run]:
    """Each chunk that differs, in order."""
    changed, size = KERNELS[held.line.device.type].changed, held.dtype.item_size
    for start in range(0, held.numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, held.numel)
        new = reader.read(start, stop)
        most = (stop - start) * size // (INDEX_BYTES + size)
        indices = changed(new, held.read(start, stop), most)
        if indices is None:
            yield Run(start, stop - start, None, new.clone())
        elif len(indices):
            yield Run(start, stop - start, indices, new.index_select(0, indices))


def merged(runs: list[Run], numel: int) -> list[Run]:
    """One run for the whole parameter, where all its chunks are sparse or all are dense."""
    sparse = [run.indices + run.start for run in runs if run.indices is not None]
    if not runs or (sparse and (len(sparse) < len(runs) or numel > MAX_SPARSE_SPAN)):
        return runs
    if not sparse and sum(run.span for run in runs) < numel:
        return runs
    bits = torch.cat([run.bits for run in runs if run.bits is not None])
    return [Run(0, numel, torch.cat(sparse) if sparse else None, bits)]


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
    _check_fits(flat, patch)
    runs = runs_of(patch)
    check_runs(runs, numel=flat.numel, name=patch.name)
    for run in runs:
        if run.bits is not None:
            run.write(flat, run.bits)


def _check_fits(flat: Flat, patch: Patch) -> None:
    if tuple(flat.tensor.shape) != tuple(patch.shape):
        raise LayoutMismatch(
            f"{patch.name}: patch of shape {patch.shape}, parameter {tuple(flat.tensor.shape)}"
        )
    for values in values_of(patch):
        if values.dtype != flat.tensor.dtype:
            raise LayoutMismatch(
                f"{patch.name}: {values.dtype} values, {flat.tensor.dtype} weights"
            )
