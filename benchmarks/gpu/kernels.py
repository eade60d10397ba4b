"""One process: finding what changed, beside what torch offers for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import baselines, ours
from benchmarks.gpu.baselines import Found
from benchmarks.gpu.cases import Run
from benchmarks.gpu.engine import synchronize
from benchmarks.gpu.pair import rounds
from benchmarks.gpu.workload import bits_of, mutate, num_elements
from benchmarks.record import Result

_MAX_COPIED_NUMEL = 2 << 30
_SEED = 1


def diff(run: Run) -> Iterator[Result]:
    """Sorted indices, values and the digests' change, against a copy of the model."""
    device = run.setup.device("trainer")
    module = run.setup.model.build(device)
    differ = ours.Differ(module)
    copied_s = copy_seconds(run, num_elements(module), device)
    for density in _densities(run):
        mutate(module, density, _SEED)
        found = _find(module, differ.old)
        sizes = _sizes(module, found, density)
        differ.changed = sizes["changed"]
        _same(differ.found(), found)
        del found
        mine = seconds(run, differ.find, device)
        mutate(module, density, _SEED)  # back again
        floor = "a copy of the model, device to device"
        yield run.record("diff", mine, copied_s, baseline=floor, **sizes)
    del differ
    if device.type == "cuda":
        yield _from_host(run, module, device)


def _from_host(run: Run, module: nn.Module, device: torch.device) -> Result:
    """The diff against a snapshot in pinned host memory, against copying that to the GPU."""
    density = 0.003
    differ = ours.Differ(module, snapshot_device=torch.device("cpu"))
    mutate(module, density, _SEED)
    numel, parameters = num_elements(module), len(differ.old)
    differ.count()
    host = max(differ.old, key=torch.Tensor.numel)
    room = torch.empty_like(host, device=device)
    share = numel / host.numel()
    copied = seconds(run, partial(room.copy_, host, non_blocking=True), device)
    mine = seconds(run, differ.find, device)
    mutate(module, density, _SEED)  # back again
    floor = "the snapshot's copy from pinned memory to the GPU"
    return run.record(
        "diff_host_snapshot",
        mine,
        [share * s for s in copied],
        baseline=floor,
        numel=numel,
        parameters=parameters,
        density=density,
        changed=differ.changed,
    )


def _densities(run: Run) -> list[float]:
    """Those that fit, at 4 bytes for each element and 20 for each changed one."""
    numel, device = run.setup.model.numel, run.setup.device("trainer")
    room = float("inf")
    if device.type == "cuda":
        room = 0.9 * torch.cuda.mem_get_info(device)[1]
    return [d for d in run.scale.densities if numel * (4 + 20 * d) <= room]


def _find(module: nn.Module, old: Sequence[Tensor]) -> Found:
    return baselines.find_changes(bits_of(module), [t.view(torch.int16).view(-1) for t in old])


def _same(mine: Found, theirs: Found) -> None:
    """Raises unless both found the same indices and values."""
    for (indices, values), (expected, new) in zip(mine, theirs, strict=True):
        if not (torch.equal(indices, expected) and torch.equal(values, new)):
            raise RuntimeError("deltasync and nonzero do not find the same changes")


def copy_seconds(run: Run, numel: int, device: torch.device) -> list[float]:
    """Seconds to copy `numel` bf16 elements; of very large models a part, scaled up."""
    copied = min(numel, _MAX_COPIED_NUMEL)
    source, target = (torch.zeros(copied, dtype=torch.bfloat16, device=device) for _ in range(2))
    taken = seconds(run, lambda: target.copy_(source), device)
    return [s * numel / copied for s in taken]


def seconds(
    run: Run,
    work: Callable[[], object],
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Seconds of each round, the device's work included."""

    def timed() -> float:
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - began

    scale = run.scale
    return list(
        rounds(timed, before, count=scale.rounds, warm_ups=scale.warm_ups, limit_s=scale.case_s)
    )


def _sizes(module: nn.Module, found: Found, density: float) -> dict[str, Any]:
    changed = sum(len(indices) for indices, _ in found)
    return {
        "numel": num_elements(module),
        "parameters": len(found),
        "density": density,
        "changed": changed,
        "bytes": 6 * changed,
        "link": "",
    }
