"""Engines that serve quantized weights: quantizing and comparing, and whole syncs to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cases import Run, parts_of, sizes_of
from benchmarks.gpu.engine import free_memory, synchronize
from benchmarks.gpu.kernels import copy_seconds, seconds
from benchmarks.gpu.pair import open_pair
from benchmarks.gpu.serving import served_source
from benchmarks.gpu.workload import mutate
from benchmarks.record import SPEED_UP, Result
from deltasync import Policy
from deltasync.delta.backend import Delta, snapshot_of
from deltasync.delta.patch import chunk_numel_on
from deltasync.delta.shard import whole
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp4 import MxFp4
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.sync.source.layout import source_specs
from deltasync.sync.source.weights import SourceLayout

FORMS: dict[str, Form] = {
    "quant_diff": BlockFp8(),
    "quant_diff_fp8_channel": Fp8(),
    "quant_diff_fp8_tensor": Fp8("tensor"),
    "quant_diff_int8": Int8(),
    "quant_diff_int4_128": Int4(128),
    "quant_diff_int4_32": Int4(32),
    "quant_diff_nvfp4": CompressedNvfp4(),
    "quant_diff_mxfp8": MxFp8(),
    "quant_diff_mxfp4": MxFp4(),
}
_DENSITY = 0.003
_SEED = 1


def quant(run: Run) -> Iterator[Result]:
    """Comparing in each served form, then whole syncs to block FP8 beside those of bfloat16."""
    device = run.setup.device("trainer")
    module = run.setup.model.build(device)
    for case, form in FORMS.items():
        yield _compare(run, module, case, form)
        free_memory(device)
    del module
    free_memory(device)
    yield from _syncs(run)


def _compare(run: Run, module: nn.Module, case: str, form: Form) -> Result:
    """One comparison to counts, indices and values, against reading both sides once."""
    device = run.setup.device("trainer")
    began = time.perf_counter()
    source = served_source(module, form)
    layout = SourceLayout(source, source_specs(source.tensors()))
    chunk_numel = chunk_numel_on(device.type)
    snapshot = snapshot_of(whole(layout.specs), layout.readers, chunk_numel=chunk_numel)
    numel = run.setup.model.numel
    mutate(module, _DENSITY, _SEED)

    def compare() -> Delta:
        source.tensors()
        return snapshot.compare(
            layout.readers,
            policy=Policy(),
            bucket_bytes=256 << 20,
            max_held_bytes=snapshot.num_bytes // 20,
            base_version=0,
        )

    synchronize(device)
    captured = time.perf_counter()
    changed = compare().nnz  # compiles
    synchronize(device)
    parts = {"capture_s": captured - began, "first_s": time.perf_counter() - captured}
    mine = seconds(run, compare, device)
    parts |= run.attempt(f"the profile of {case}", lambda: _profile(compare, device)) or {}
    read_bytes = 2 * numel + snapshot.num_bytes
    # Copying reads and writes.
    floor = [s * read_bytes / (4 * numel) for s in copy_seconds(run, numel, device)]
    return run.record(
        case,
        mine,
        floor,
        baseline="reading the weights and the snapshot once, at the rate of a copy",
        numel=numel,
        parameters=len(layout.specs),
        density=_DENSITY,
        changed=changed,
        parts=parts,
        bytes=read_bytes,
        link="",
    )


def _profile(compare: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of one comparison: of the call until it returns, and of each kernel on the GPU.

    The call waits for the counts. What is collected goes on after it.
    """
    synchronize(device)
    began = time.perf_counter()
    compare()
    parts = {"call_s": time.perf_counter() - began}
    synchronize(device)
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            compare()
            synchronize(device)
        for one in seen.key_averages():
            if one.self_device_time_total > 0:
                parts[one.key] = parts.get(one.key, 0.0) + one.self_device_time_total * 1e-6
    return parts


def _syncs(run: Run) -> Iterator[Result]:
    done: dict[str, tuple[list[float], dict[str, Any], dict[str, float]]] = {}
    for form in ("", "block FP8"):
        with open_pair(run.engine, run.setup.geometry, form=form) as pair:
            syncs = run.syncs(pair, run.changes(pair, _DENSITY))
            pair.check()
            parts = parts_of([one.stats for one in syncs])
            done[form] = [s.seconds for s in syncs], sizes_of(pair, syncs, _DENSITY), parts
    (theirs, other, _), (mine, sizes, parts) = done.values()
    yield run.record(
        "quant_sync",
        mine,
        theirs,
        ratio_is=SPEED_UP,
        baseline="the same changes to an engine that serves bfloat16",
        bound_bytes=other["bytes"],
        parts=parts,
        **sizes,
    )
