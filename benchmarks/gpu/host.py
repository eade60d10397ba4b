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

from benchmarks.gpu.baselines import Found
from benchmarks.gpu.cases import Run, parts_of, sizes_of
from benchmarks.gpu.geometry import GEOMETRIES
from benchmarks.gpu.ours import ALWAYS_SPARSE, layout_of
from benchmarks.gpu.pair import Pair, Synced, open_pair
from benchmarks.gpu.workload import bits_of, mutate, num_elements
from benchmarks.record import PER_PARAMETER, SLOW_DOWN, SPEED_UP, Result, compared
from benchmarks.timing import interleave
from deltasync import Policy, SenderOptions
from deltasync.delta.bits import Flat
from deltasync.delta.diff import find_runs
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import compare_checkpoints

_SPARSE, _DENSE = SenderOptions(), SenderOptions(policy=Policy(dense_above=0.0))
_DIFF_GOAL, _DIFF_GOAL_UP_TO = 1.7, 0.01
_SYNC_GOAL, _PER_PARAMETER_GOAL_US, _FILES_GOAL = 1.1, 10.0, 0.6
_FILE_DENSITIES = (0.001, 0.01)
_BLOCK_BYTES = 1 << 20  # what numpy compares at once: neither smaller nor larger ones are faster
_SEED = 1


def diff(run: Run) -> Iterator[Result]:
    """Indices and values of what changed, without digests, against the same in plain torch."""
    module = run.setup.model.build(torch.device("cpu"))
    old = [parameter.detach().clone() for parameter in module.parameters()]
    pairs = list(zip(layout_of(module)[1], map(Flat.of, old), strict=True))
    for density in run.scale.densities:
        mutate(module, density, _SEED)
        found = torch_diff(module, old)
        samples = interleave(
            {
                "torch": lambda: torch_diff(module, old),
                "ours": lambda: [find_runs(reader, flat, ALWAYS_SPARSE) for reader, flat in pairs],
            },
            rounds=run.scale.rounds,
        )
        mutate(module, density, _SEED)  # back again
        changed = sum(len(indices) for indices, _ in found)
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


def sync(run: Run) -> Iterator[Result]:
    """The default policy against the same sync with every chunk dense, by turns."""
    with open_pair(run.engine, run.setup.geometry) as pair:
        for density in run.scale.densities:
            change = run.changes(pair, density)
            done: tuple[list[Synced], list[Synced]] = ([], [])
            for turn in range(run.scale.rounds + 1):
                for way in (0, 1) if turn % 2 else (1, 0):
                    change()
                    done[way].append(pair.sync((_SPARSE, _DENSE)[way]))
            sparse, dense = (syncs[1:] for syncs in done)
            yield compared(
                case="cpu_sync",
                samples=[s.seconds for s in sparse],
                baseline="the same sync, every chunk dense",
                baseline_samples=[s.seconds for s in dense],
                ratio_is=SLOW_DOWN,
                goal=_SYNC_GOAL,
                bound_bytes=dense[0].stats.payload_bytes,
                parts=parts_of([s.stats for s in sparse]),
                link=run.setup.transport,
                **sizes_of(pair, sparse, density),
            )
        pair.check()


def small(run: Run) -> Iterator[Result]:
    """A model of many small parameters of which one element changes: what each one costs."""
    with open_pair(run.engine, run.scale.many) as pair:
        done = run.syncs(pair, partial(_flip_one, pair))
        pair.check()
        result = run.record(
            "parameter_sync",
            [s.seconds for s in done],
            parts=parts_of([s.stats for s in done]),
            **sizes_of(pair, done, 1 / pair.numel),
        )
        cost_us = 1e6 * result.seconds / pair.num_parameters
        yield replace(
            result,
            model="",
            ratio=cost_us,
            ratio_is=PER_PARAMETER,
            goal=_PER_PARAMETER_GOAL_US,
            met=cost_us <= _PER_PARAMETER_GOAL_US,
        )


def _flip_one(pair: Pair) -> None:
    bits_of(pair.module)[0][0] ^= 1


def files(run: Run) -> Iterator[Result]:
    """Two checkpoints: `deltasync diff` without what encodings take, page cache warm."""
    module = GEOMETRIES[run.scale.files].build(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        old, new = (Path(name, f"{one}.safetensors") for one in ("old", "new"))
        _save(module, old)
        for density in _FILE_DENSITIES:
            mutate(module, density, _SEED)
            _save(module, new)
            mutate(module, density, _SEED)  # back again
            samples = interleave(
                {"diff": partial(_compare, old, new), "numpy": partial(_numpy, old, new)},
                rounds=run.scale.rounds,
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
