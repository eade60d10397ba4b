"""Between two tensors: `diff` finds the patch that makes one the other, `apply_patch` writes it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from deltasync.delta.bits import Flat, dtype_of
from deltasync.delta.host.backend import changed_runs, merged
from deltasync.delta.patch import Patch, check_runs, patch_from_runs, runs_of, values_of
from deltasync.delta.policy import Policy
from deltasync.delta.readers import WireReader
from deltasync.errors import LayoutMismatch


def diff(old: Tensor, new: Tensor, *, name: str = "", policy: Policy | None = None) -> Patch | None:
    """The patch that makes `old` bit-identical to `new`, or None if it is already.

    Args:
        old: What the receiver holds.
        new: The parameter, of the same shape and device; of `old`'s dtype or of another floating
            dtype, which is then rounded to `old`'s. Any strides.
        name: Checkpoint name to put into the patch.
        policy: When to go dense.

    Raises:
        LayoutMismatch: The shapes differ.
        ConfigError: The dtypes cannot be compared, or a tensor has no plain storage.
    """
    if new.shape != old.shape:
        raise LayoutMismatch(f"{name}: shape {tuple(new.shape)} against {tuple(old.shape)}")
    reader = WireReader.of(new, dtype_of(old), name=name)
    held, policy, kind = Flat.of(old, name=name), policy or Policy(), old.device.type
    step, crossover = policy.chunk_numel_on(kind), policy.crossover(kind)
    found = [run for run, _ in changed_runs(reader, held, step=step, crossover=crossover)]
    runs = merged(found, old.numel())
    if not runs:
        return None
    filled = [
        replace(run, bits=reader.read(run.start, run.stop).clone()) if run.bits is None else run
        for run in runs
    ]
    return patch_from_runs(name, tuple(old.shape), filled, old.dtype)


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
