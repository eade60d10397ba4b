"""The groups of cases of CPUs: payloads travel through shared memory, a process has one thread."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import deltasync
from benchmarks.record import PER_PARAMETER, SLOW_DOWN, SPEED_UP, Result, compared
from benchmarks.syncs.baselines import Found
from benchmarks.syncs.cases import changes, parts_of, record, rounds, sizes_of, timed
from benchmarks.syncs.ends import End, Trainer, joined
from benchmarks.syncs.geometry import GEOMETRIES
from benchmarks.syncs.group import Group
from benchmarks.syncs.workload import bits_of, mutate, num_elements
from benchmarks.timing import interleave
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import compare_checkpoints
from deltasync.files.patch import Patch

_DIFF_GOAL, _DIFF_GOAL_UP_TO = 1.7, 0.01
_SYNC_GOAL, _PER_PARAMETER_GOAL_US, _FILES_GOAL = 1.1, 10.0, 0.6
_FILE_DENSITIES = (0.001, 0.01)
_BLOCK_BYTES = 1 << 20  # what numpy compares at once: neither smaller nor larger ones are faster
_SEED = 1


def diff(group: Group) -> Iterator[Result]:
    """`diff` against the same in plain torch: no checks, no digests."""
    module = group.plan.model.build(group.device)
    old = [parameter.detach().clone() for parameter in module.parameters()]
    new = [parameter.detach() for parameter in module.parameters()]

    def find() -> list[Patch | None]:
        pairs = zip(old, new, strict=True)
        return [deltasync.diff(a, b) for a, b in pairs]

    for density in group.plan.sizes.densities:
        mutate(module, density, _SEED)
        changed = sum(len(indices) for indices, _ in torch_diff(module, old))
        samples = interleave(
            {"torch": partial(torch_diff, module, old), "ours": find},
            rounds=group.plan.sizes.rounds,
        )
        mutate(module, density, _SEED)  # back again
        yield compared(
            case="cpu_diff",
            samples=samples["ours"],
            baseline="torch.ne + nonzero + gather",
            baseline_samples=samples["torch"],
            ratio_is=SPEED_UP,
            goal=_DIFF_GOAL if density <= _DIFF_GOAL_UP_TO else None,
            bytes=6 * changed,
            **_sizes(module, density, changed),
        )


def torch_diff(module: nn.Module, old: list[Tensor]) -> Found:
    """(int64 indices, values) of each parameter's changes. Integer views: NaN equals itself."""
    found = []
    for new, base in zip(bits_of(module), old, strict=True):
        indices = torch.ne(new, base.view(torch.int16).view(-1)).nonzero().squeeze(1)
        found.append((indices, new.index_select(0, indices)))
    return found


def sync(group: Group) -> Iterator[Result]:
    """Against syncs that send all elements, since all have changed, by turns."""
    with joined(group) as end:
        for density in group.plan.sizes.densities:
            ways = changes(end, density), changes(end, 1.0)
            samples: tuple[list[float], list[float]] = ([], [])
            for turn in range(group.plan.sizes.rounds + 1):  # the first does not count
                for way in (0, 1) if turn % 2 else (1, 0):
                    ways[way]()
                    samples[way].append(timed(group, end.sync))
            if not isinstance(end, Trainer):
                continue
            last = end.stats[-2 * group.plan.sizes.rounds :]
            stats = [one for one in last if one.payload_bytes <= last[0].payload_bytes]
            yield compared(
                case="cpu_sync",
                samples=samples[0][1:],
                baseline="the same sync, all elements changed",
                baseline_samples=samples[1][1:],
                ratio_is=SLOW_DOWN,
                goal=_SYNC_GOAL,
                bound_bytes=max(one.payload_bytes for one in last),
                parts=parts_of(stats),
                **sizes_of(end, stats, density),
            )
        end.check()


def small(group: Group) -> Iterator[Result]:
    """A model of many small parameters of which one element changes: what each one costs."""
    sizes = group.plan.sizes
    with joined(group, geometry=sizes.many) as end:
        took = rounds(end, end.sync, partial(_flip_one, end), sizes.rounds, warm_ups=sizes.warm_ups)
        end.check()
        if group.rank:
            return
        result = record("parameter_sync", end, took, (), 1 / group.plan.model.numel)
        cost_us = 1e6 * result.seconds / result.parameters
        yield replace(
            result,
            model="",
            ratio=cost_us,
            ratio_is=PER_PARAMETER,
            goal=_PER_PARAMETER_GOAL_US,
            met=cost_us <= _PER_PARAMETER_GOAL_US,
        )


def _flip_one(end: End) -> None:
    if isinstance(end, Trainer):
        bits_of(end.module)[0][0] ^= 1


def files(group: Group) -> Iterator[Result]:
    """Two checkpoints: `deltasync diff` without what encodings take, page cache warm."""
    module = GEOMETRIES[group.plan.sizes.files].build(group.device)
    with tempfile.TemporaryDirectory() as name:
        old, new = (Path(name, f"{one}.safetensors") for one in ("old", "new"))
        _save(module, old)
        for density in _FILE_DENSITIES:
            mutate(module, density, _SEED)
            _save(module, new)
            mutate(module, density, _SEED)  # back again
            samples = interleave(
                {"diff": partial(_compare, old, new), "numpy": partial(_numpy, old, new)},
                rounds=group.plan.sizes.rounds,
            )
            yield compared(
                case="files",
                samples=samples["diff"],
                baseline="np.memmap of both files, np.array_equal by MiB",
                baseline_samples=samples["numpy"],
                ratio_is=SPEED_UP,
                goal=_FILES_GOAL,
                bytes=old.stat().st_size + new.stat().st_size,
                **_sizes(module, density, round(density * num_elements(module))),
            )


def _compare(old: Path, new: Path) -> None:
    compare_checkpoints(Checkpoint(old), Checkpoint(new), encodings=False)


def _numpy(old: Path, new: Path) -> int:
    before, after = (np.memmap(path, np.uint8, "r") for path in (old, new))
    equal = 0
    for begin in range(0, len(before), _BLOCK_BYTES):
        block = slice(begin, begin + _BLOCK_BYTES)
        equal += np.array_equal(before[block], after[block])
    return equal


def _save(module: nn.Module, path: Path) -> None:
    save_file({name: tensor.detach() for name, tensor in module.named_parameters()}, path)


def _sizes(module: nn.Module, density: float, changed: int) -> dict[str, Any]:
    return {
        "numel": num_elements(module),
        "parameters": sum(1 for _ in module.parameters()),
        "density": density,
        "changed": changed,
    }
