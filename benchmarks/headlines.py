"""The records that docs/performance.md shows: what a reader decides by, out of benchmarks/results.

`python -m benchmarks table --records FILE` prints all that a file has.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.codec.pairs import BFLOAT16
from benchmarks.codec.record import CodecRecord
from benchmarks.record import Result
from benchmarks.store.record import StoreRecord

IMAGES = frozenset({
    "gpu-nccl-sync", "live-gpu-requests", "codec-cpu-bytes", "timeline-nccl-lanes",
})  # fmt: skip
_CASES = frozenset({
    # whole syncs: of few and many parameters, to several engines, to other forms
    "sync_over_dense", "sync_over_usual", "moe_sync", "moe_sync_most", "receivers_7",
    "quant_sync", "adamw", "large_over_dense",
    # their parts
    "diff", "diff_host_snapshot", "memory_sender", "memory_receiver",
    # engines, and trainers of several ranks
    "engine_work_over_dense", "engine_pause_over_sparse",
    "sharded_over_dense", "sharded_over_gathered", "sharded_pause", "sharded_large",
    # on CPUs
    "parameter_sync", "files", "fleet_sync",
})  # fmt: skip
_ON_ONE_GPU = frozenset({"sync_over_dense", "sync_over_usual", "adamw"})
_DENSITIES = frozenset({0.001, 0.003, 0.01, 0.05, 0.2, 1.0})
_CODERS = frozenset({
    "gap, ulp, zstd", "block", "class", "int32 + value, zstd", "u16 gap + XOR, zstd (NeMo-RL)",
    "COO u8, u16 + value, zstd (PULSE v3.1)", "dense XOR, zstd (slime, SkyRL)",
})  # fmt: skip
_RATES = (1e-7, 1e-6, 1e-5)
_LINKS_BIT_S = (1e8, 1e9)


def of_results(results: Sequence[Result]) -> list[Result]:
    """Records of CPUs and GPUs without cases, densities and sizes that say the same once more."""
    is_one_gpu = any(result.link == "CUDA IPC" for result in results)
    cases = _ON_ONE_GPU if is_one_gpu else _CASES
    return [result for result in results if result.case in cases and not _is_repeated(result)]


def without_parts(markdown: str) -> str:
    """A table of whole syncs without what each part of a sync took."""
    return "\n".join(line for line in markdown.split("\n") if not line.startswith("| of it "))


def of_live(results: Sequence[Result]) -> list[Result]:
    """One share of changed elements, of servers and of a quantized engine."""
    shown = [r for r in results if "vllm serve" in r.model or "FP8" in r.model]
    return [r for r in shown if r.density == 0.001]


def of_codecs(records: Sequence[CodecRecord]) -> list[CodecRecord]:
    """Trainings from a checkpoint; of quantized forms only those at one learning rate."""
    kept = [r for r in records if r.coder in _CODERS and r.kept == "masters"]
    served = [r for r in kept if r.form != BFLOAT16 and r.lr == 1e-6]
    return [r for r in kept if r.form == BFLOAT16 and r.lr in _RATES and r.steps == 1] + served


def of_stores(records: Sequence[StoreRecord]) -> list[StoreRecord]:
    """The last pair of versions, over the slower links."""
    last = records[-1].pair
    return [r for r in records if r.pair == last and r.bits_per_s in _LINKS_BIT_S]


def _is_repeated(result: Result) -> bool:
    if result.case.startswith("memory_"):
        return result.density != 1.0
    if result.case == "sharded_large":
        return result.numel < 1 << 34
    if result.case in ("files", "sharded_over_dense", "sharded_over_gathered", "sharded_pause"):
        return result.density != 0.01
    swept = ("sync_", "diff", "apply")
    return result.case.startswith(swept) and result.density not in _DENSITIES
