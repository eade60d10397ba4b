"""Between two tensors: `diff` finds the patch that makes one the other, `apply_patch` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, Live, Run, WireReader, dtype_of
from deltasync.delta.kernels import KERNELS
from deltasync.delta.patch import ChunkedPatch, Patch, patch_from_runs, runs_of
from deltasync.delta.policy import Policy
from deltasync.errors import InvalidIndices, LayoutMismatch
from deltasync.wire.table import MAX_SPARSE_SPAN


def diff(
    new: Tensor, base: Tensor, *, name: str = "", policy: Policy | None = None
) -> Patch | None:
    """The patch that makes `base` bit-identical to `new`, or None if it is already.

    Args:
        new: The parameter; of `base`'s dtype or of another floating dtype, which is then
            rounded to `base`'s. Any strides.
        base: What the receiver holds. Same shape and device.
        name: Checkpoint name to put into the patch.
        policy: When to go dense.

    Raises:
        LayoutMismatch: The shapes differ.
        ConfigError: The dtypes cannot be compared, or a tensor has no plain storage.
    """
    if new.shape != base.shape:
        raise LayoutMismatch(f"{name}: shape {tuple(new.shape)} against {tuple(base.shape)}")
    reader = WireReader.of(new, dtype_of(base), name=name)
    runs, _ = find_runs(reader, Flat.of(base, name=name), policy or Policy())
    if not runs:
        return None
    filled = [
        replace(run, bits=reader.read(run.start, run.stop).clone()) if run.bits is None else run
        for run in runs
    ]
    return patch_from_runs(name, tuple(base.shape), filled, base.dtype)


def find_runs(reader: WireReader, old: Flat, policy: Policy) -> tuple[list[Run], int]:
    """The runs in which `reader` differs from `old`, and the number of differing elements."""
    device_type = old.line.device.type
    step, crossover = policy.chunk_numel_on(device_type), policy.crossover(device_type)
    found = list(changed_runs(reader, old, step=step, crossover=crossover))
    return merged([run for run, _ in found], old.numel), sum(count for _, count in found)


def changed_runs(
    reader: WireReader, old: Live, *, step: int, crossover: float
) -> Iterator[tuple[Run, int]]:
    """(run, differing elements) of each chunk that differs, in order.

    This decides whether a change is sent sparse or dense; on GPUs `batched.backend` does.

    Args:
        reader: The new bits.
        old: The old bits; on the device that compares.
        step: Elements of a chunk.
        crossover: The density above which a chunk is dense.
    """
    numel, device = old.numel, old.line.device
    changed = KERNELS[device.type].changed
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        new_bits = reader.read(start, stop).to(device)
        count, found = changed(new_bits, old.read(start, stop), crossover * (stop - start))
        if found is None:
            yield Run(start, stop - start), count
        elif count:
            yield Run(start, stop - start, found[0], found[1]), count


def merged(runs: list[Run], numel: int) -> list[Run]:
    """One run for the whole parameter, where all its chunks are sparse or all are dense."""
    sparse = [run for run in runs if run.indices is not None]
    if not sparse and sum(run.span for run in runs) == numel > 0:
        return [Run(0, numel)]
    # An int32 index relative to the parameter's beginning must not wrap around.
    if not sparse or len(sparse) < len(runs) or numel > MAX_SPARSE_SPAN:
        return runs
    if len(sparse) == 1 and sparse[0].span == numel:
        return sparse
    indices = torch.cat([run.indices + run.start for run in sparse if run.indices is not None])
    return [Run(0, numel, indices, torch.cat([run.bits for run in sparse if run.bits is not None]))]


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
    _check_runs(runs, flat.numel, patch.name)
    for run in runs:
        if run.bits is not None:
            run.write(flat, run.bits)


def _check_fits(flat: Flat, patch: Patch) -> None:
    if tuple(flat.tensor.shape) != tuple(patch.shape):
        raise LayoutMismatch(
            f"{patch.name}: patch of shape {patch.shape}, parameter {tuple(flat.tensor.shape)}"
        )
    for values in (
        [c.values for c in patch.chunks] if isinstance(patch, ChunkedPatch) else [patch.values]
    ):
        if values.dtype != flat.tensor.dtype:
            raise LayoutMismatch(
                f"{patch.name}: {values.dtype} values, {flat.tensor.dtype} weights"
            )


def _check_runs(runs: list[Run], numel: int, name: str) -> None:
    end = 0
    for run in runs:
        if not end <= run.start <= run.stop <= numel:
            raise InvalidIndices(f"{name}: chunks overlap, are unsorted or out of range")
        if run.bits is None or run.bits.shape != (run.count,):
            raise InvalidIndices(f"{name}: not one value for each index")
        end = run.stop
        check_indices(run, name=name)


def check_indices(run: Run, *, name: str) -> None:
    """Raises InvalidIndices unless a sparse run's indices rise strictly within its span."""
    if run.indices is None:
        return
    if not KERNELS[run.indices.device.type].is_increasing(run.indices, run.span):
        raise InvalidIndices(f"{name}: indices out of range, unsorted or repeated")
