"""One process: finding what changed and writing it, against the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import deltasync
from benchmarks.record import SLOW_DOWN, SPEED_UP, Result, compared
from benchmarks.timing import cold_cache, interleave
from benchmarks.workload import Flip, Scale, bits_of, copy_of, decoder, num_elements
from deltasync import Policy, apply_patch
from deltasync.delta.backend import Backend, snapshot_of
from deltasync.delta.bits import Flat, Run, dtype_of
from deltasync.delta.diff import find_runs
from deltasync.delta.host.staging import Lines, Staging
from deltasync.delta.patch import CHUNK_NUMEL, Patch
from deltasync.delta.readers import WireReader
from deltasync.delta.shard import whole
from deltasync.testing.payloads import stage_runs
from deltasync.wire.messages import ParameterSpec

_BUCKET_BYTES = 256 << 20  # so that there is one
ALWAYS_SPARSE = Policy(dense_above=1.0)
DIFF_GOAL, DIFF_GOAL_UP_TO = 1.7, 0.01
APPLY_GOAL = 1.2
COMMIT_GOAL, COMMIT_DENSITIES = 2.5, (0.003, 0.01)


def diff(scale: Scale) -> Iterator[Result]:
    """Indices and values of what changed: with and without digests, and in plain torch."""
    module = decoder(scale.hidden, scale.layers)
    specs, readers = layout_of(module)
    snapshot = snapshot_of(whole(specs), readers, chunk_numel=CHUNK_NUMEL)
    for density in scale.densities:
        flip = Flip(module, density)
        flip.apply()
        samples = _time_diffs(module, readers, snapshot, scale.rounds)
        flip.apply()
        for case in ("diff", "diff_with_digests"):
            has_goal = case == "diff" and density <= DIFF_GOAL_UP_TO
            yield compared(
                case=case,
                **size_of(module, flip, density),
                samples=samples[case],
                baseline="torch.ne + nonzero + gather",
                baseline_samples=samples["torch"],
                ratio_is=SPEED_UP,
                goal=DIFF_GOAL if has_goal else None,
                bytes=6 * flip.count,
            )


def _time_diffs(
    module: nn.Module, readers: list[WireReader], snapshot: Backend, rounds: int
) -> dict[str, list[float]]:
    """Without digests always sparse, as the baseline is; with digests as a sync does it."""
    copies = [flat for flat in snapshot.flats.values() if isinstance(flat, Flat)]
    old = [flat.tensor for flat in copies]
    pairs = list(zip(readers, copies, strict=True))
    return interleave(
        {
            "torch": lambda: torch_diff(module, old),
            "diff": lambda: [find_runs(reader, flat, ALWAYS_SPARSE) for reader, flat in pairs],
            "diff_with_digests": lambda: snapshot.compare(
                readers,
                policy=Policy(),
                bucket_bytes=_BUCKET_BYTES,
                max_held_bytes=1 << 62,
                base_version=0,
            ),
        },
        rounds=rounds,
    )


def torch_diff(module: nn.Module, old: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(int64 indices, values) of each parameter's changes. Integer views: NaN equals itself."""
    found = []
    for new, base in zip(bits_of(module), old, strict=True):
        indices = torch.ne(new, base.view(torch.int16)).nonzero().squeeze(1)
        found.append((indices, new.index_select(0, indices)))
    return found


def apply(scale: Scale) -> Iterator[Result]:
    """`apply_patch`: checks the indices and writes, no undo log."""
    module = decoder(scale.hidden, scale.layers)
    target = copy_of(module)
    evict = cold_cache()
    for density in scale.densities:
        flip = Flip(module, density)
        flip.apply()
        samples = _time_applies(module, target, flip, scale.rounds, evict)
        yield _beside_scatter("apply", module, flip, density, samples, goal=APPLY_GOAL)


def _time_applies(
    module: nn.Module, target: list[Tensor], flip: Flip, rounds: int, evict: Callable[[], None]
) -> dict[str, list[float]]:
    """`target` becomes equal to `module`."""
    patches = [
        deltasync.diff(old, new.detach(), policy=ALWAYS_SPARSE)
        for new, old in zip(module.parameters(), target, strict=True)
    ]
    values = values_at(bits_of(module), flip.positions)
    bits = [tensor.view(torch.int16).view(-1) for tensor in target]
    return interleave(
        {
            "torch": lambda: torch_scatter(bits, flip.positions, values),
            "ours": lambda: _apply_all(target, patches),
        },
        rounds=rounds,
        before=evict,
    )


def torch_scatter(target: list[Tensor], positions: list[Tensor], values: list[Tensor]) -> None:
    for bits, where, new in zip(target, positions, values, strict=True):
        bits.scatter_(0, where, new)


def values_at(bits: list[Tensor], positions: list[Tensor]) -> list[Tensor]:
    return [b.index_select(0, where) for b, where in zip(bits, positions, strict=True)]


def _beside_scatter(
    case: str,
    module: nn.Module,
    flip: Flip,
    density: float,
    samples: dict[str, list[float]],
    *,
    goal: float,
) -> Result:
    return compared(
        case=case,
        **size_of(module, flip, density),
        samples=samples["ours"],
        baseline="scatter_ with int64 indices",
        baseline_samples=samples["torch"],
        ratio_is=SLOW_DOWN,
        goal=goal,
        bytes=6 * flip.count,
    )


def commit(scale: Scale) -> Iterator[Result]:
    """The pause: write, read back, digest. The undo log was taken while staging."""
    evict = cold_cache()
    for hidden, layers in scale.commits:
        module = decoder(hidden, layers)
        specs, readers = layout_of(module)
        snapshot = snapshot_of(whole(specs), readers, chunk_numel=CHUNK_NUMEL)
        for density in COMMIT_DENSITIES:
            flip = Flip(module, density)
            samples = _time_commits(module, snapshot, flip, scale.rounds, evict)
            yield _beside_scatter("commit", module, flip, density, samples, goal=COMMIT_GOAL)


def _time_commits(
    module: nn.Module, snapshot: Backend, flip: Flip, rounds: int, evict: Callable[[], None]
) -> dict[str, list[float]]:
    """`module` is afterwards what it was."""
    bits = bits_of(module)
    values = [v ^ 1 for v in values_at(bits, flip.positions)]
    staging = _staged(snapshot, flip, values)
    samples = interleave(
        {
            "torch": lambda: torch_scatter(bits, flip.positions, values),
            "ours": lambda: _commit(staging),
        },
        rounds=rounds,
        before=evict,
    )
    staging.undo()
    return samples


def layout_of(module: nn.Module) -> tuple[list[ParameterSpec], list[WireReader]]:
    """A module's parameters as the sender sees them."""
    specs, readers = [], []
    for name, parameter in module.named_parameters():
        dtype = dtype_of(parameter)
        specs.append(ParameterSpec((name,), tuple(parameter.shape), dtype))
        readers.append(WireReader.of(parameter, dtype, name=name))
    return specs, readers


def size_of(module: nn.Module, flip: Flip, density: float) -> dict[str, Any]:
    return {
        "numel": num_elements(module),
        "parameters": len(flip.positions),
        "density": density,
        "changed": flip.count,
    }


def _apply_all(target: list[Tensor], patches: list[Patch | None]) -> None:
    for tensor, patch in zip(target, patches, strict=True):
        if patch is not None:
            apply_patch(tensor, patch)


def _staged(snapshot: Backend, flip: Flip, values: list[Tensor]) -> Staging:
    """A change staged onto the module that `snapshot` equals."""
    flats = {number: Flat.of(tensor) for number, tensor in enumerate(flip.parameters)}
    staging = Staging(Lines(flats, len(flats)), snapshot.ledger)
    runs = [
        (number, Run(0, flats[number].numel, positions.int(), bits))
        for number, (positions, bits) in enumerate(zip(flip.positions, values, strict=True))
        if len(positions)
    ]
    stage_runs(staging, runs, snapshot.ledger.specs, bucket_bytes=_BUCKET_BYTES)
    return staging


def _commit(staging: Staging) -> None:
    if staging.commit() != staging.ledger.total:
        raise RuntimeError("the weights read back are not those that were written")
