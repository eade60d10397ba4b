"""One process: finding what changed and writing it, beside what torch offers for that."""

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
from benchmarks.gpu.workload import mutate
from benchmarks.record import SLOW_DOWN, SPEED_UP, Result
from benchmarks.workload import bits_of, num_elements

_MAX_COPIED_NUMEL = 2 << 30
_SEED = 1


def diff(run: Run) -> Iterator[Result]:
    """Sorted indices, values and the digests' change, against a copy of the model."""
    device = run.setup.device("trainer")
    module = run.setup.model.build(device)
    differ = ours.Differ(module)
    copied_s = copy_seconds(run, num_elements(module), device)
    for density in _densities(run, each=4, changed=20):
        mutate(module, density, _SEED)
        found = _find(module, differ.old)
        sizes = _sizes(module, found, density)
        differ.changed = sizes["changed"]
        _same(differ.found(), found)
        del found
        mine = seconds(run, differ.find, device)
        packed = seconds(run, differ.pack, device)
        usual = seconds(run, partial(_find, module, differ.old), device)
        mutate(module, density, _SEED)  # back again
        floor = "a copy of the model, device to device"
        yield run.record("diff", mine, copied_s, baseline=floor, **sizes)
        yield run.record("diff_packed", packed, copied_s, baseline=floor, **sizes)
        slow = "nonzero and a gather for each parameter"
        yield run.record("diff_over_usual", mine, usual, ratio_is=SPEED_UP, baseline=slow, **sizes)
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


def apply(run: Run) -> Iterator[Result]:
    """The commit of staged changes, against bare writes and against NaN-masked staging."""
    device = run.setup.device("trainer")
    module = run.setup.model.build(device)
    differ = ours.Differ(module)
    for density in _densities(run, each=8, changed=30):
        mutate(module, density, _SEED)
        found = _find(module, differ.old)
        sizes = _sizes(module, found, density)
        differ.changed = sizes["changed"]
        samples = _apply_samples(run, module, differ, found)
        mutate(module, density, _SEED)  # back again
        for case, key, baseline in _APPLIED:
            ratio_is = SLOW_DOWN if case == "apply_over_flat" else SPEED_UP
            mine, theirs = samples["ours"], samples[key]
            yield run.record(case, mine, theirs, baseline=baseline, ratio_is=ratio_is, **sizes)


_APPLIED = (
    ("apply_over_flat", "flat", "one index_copy_ with int64 indices: no checks, no undo"),
    ("apply_over_each", "each", "index_copy_ for each parameter"),
    ("apply_over_nan", "nan", "NaN-masked load_weights with fused parameters"),
)


def _apply_samples(
    run: Run, module: nn.Module, differ: ours.Differ, found: Found
) -> dict[str, list[float]]:
    """Seconds of each way. Each writes what `differ` was made of; the result is compared."""
    bits = [t.view(torch.int16).clone() for t in differ.old]
    samples = {
        "flat": _flat_samples(run, module, bits, found),
        "nan": _nan_samples(run, module, bits, found),
        "each": _each_samples(run, module, bits, found),
    }
    target = [b.view(torch.bfloat16) for b in bits]
    stager = ours.Stager(differ, target, differ.buckets())
    samples["ours"] = seconds(run, stager.commit, bits[0].device, before=stager.stage)
    _check(bits, module)
    return samples


def _each_samples(run: Run, module: nn.Module, target: list[Tensor], found: Found) -> list[float]:
    """`target` is afterwards what it was."""
    lost = [(i, t.index_select(0, i.long())) for t, (i, _) in zip(target, found, strict=True)]
    samples = seconds(run, partial(_write_each, target, found), target[0].device)
    _check(target, module)
    _write_each(target, lost)
    return samples


def _flat_samples(run: Run, module: nn.Module, target: list[Tensor], found: Found) -> list[float]:
    """One launch, of a model that is one tensor, with int64 indices that are ready."""
    starts = torch.tensor([0, *(len(t) for t in target)]).cumsum(0).tolist()
    positions = [i.long() + start for (i, _), start in zip(found, starts, strict=False)]
    flat, indices = torch.cat(target), torch.cat(positions)
    values = torch.cat([v for _, v in found])
    samples = seconds(run, partial(flat.index_copy_, 0, indices, values), flat.device)
    _check(torch.split(flat, [len(t) for t in target]), module)
    return samples


def _nan_samples(run: Run, module: nn.Module, target: list[Tensor], found: Found) -> list[float]:
    shapes = run.setup.model.shapes()
    fused = baselines.FusedModel(shapes, target[0].device)
    for part, held in zip(fused.parts.values(), target, strict=True):
        part.copy_(held.view(torch.bfloat16).view_as(part))
    changes = {n: (i, v.view(torch.bfloat16)) for n, (i, v) in enumerate(found) if len(i)}
    work = partial(baselines.apply_through_nan, fused, shapes, changes)
    samples = seconds(run, work, target[0].device)
    _check([p.reshape(-1).view(torch.int16) for p in fused.parts.values()], module)
    return samples


def _check(written: Sequence[Tensor], module: nn.Module) -> None:
    """Raises unless flat int16 tensors hold a module's bits."""
    if not all(map(torch.equal, written, bits_of(module))):
        raise RuntimeError("what was written is not what was meant")


def _write_each(target: Sequence[Tensor], found: Found) -> None:
    for bits, (indices, values) in zip(target, found, strict=True):
        bits.index_copy_(0, indices.long(), values)


def _densities(run: Run, *, each: int, changed: int) -> list[float]:
    """Those that fit, at so many bytes for each element and for each changed one."""
    numel, device = run.setup.model.numel, run.setup.device("trainer")
    room = float("inf")
    if device.type == "cuda":
        room = 0.9 * torch.cuda.mem_get_info(device)[1]
    return [d for d in run.scale.densities if numel * (each + changed * d) <= room]


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
