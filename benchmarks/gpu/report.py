"""Records of GPU runs as a table for a terminal and as Markdown for docs/performance.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.table import Table

from benchmarks.record import MEMORY, PER_PARAMETER, Result
from benchmarks.report import bold, describe, mebibytes, megabytes, milliseconds, ratio, row, sign
from benchmarks.sharded.plan import ranks_of

TITLES = {
    "sync_over_dense": "whole sync vs. dense broadcast",
    "sync_over_usual": "whole sync vs. per-parameter sparse",
    "sync_diff": "of the sync: compare",
    "sync_transfer": "of the sync: pack, send, stage, check",
    "sync_commit": "of the sync: decision to last reply",
    "sync_receiver_commit": "of that: write and read back",
    "commit_growth": "receiver's commit of 2 Mi changes vs. the smallest model",
    "moe_sync": "whole sync of 19,000 parameters vs. as many bytes in 310",
    "moe_sync_most": "whole sync of 70,000 parameters vs. as many bytes in 310",
    "receivers_2": "whole sync to two engines vs. to one",
    "receivers_3": "whole sync to three engines vs. to one",
    "receivers_4": "whole sync to four engines vs. to one",
    "receivers_7": "whole sync to seven engines vs. to one",
    "quant_diff": "quantizing and comparing block FP8 vs. reading both sides once",
    "quant_diff_fp8_channel": "the same in FP8 per channel",
    "quant_diff_fp8_tensor": "the same in FP8 per tensor",
    "quant_diff_int8": "the same in INT8 per channel",
    "quant_diff_int4_128": "the same in INT4 of groups of 128",
    "quant_diff_int4_32": "the same in INT4 of groups of 32",
    "quant_diff_nvfp4": "the same in NVFP4",
    "quant_diff_mxfp8": "the same in MXFP8",
    "quant_diff_mxfp4": "the same in MXFP4",
    "quant_sync": "whole sync to block FP8 vs. to bfloat16",
    "codec_block_encode": "diff, packing and coding in blocks vs. without coding",
    "codec_block_write": "decoding blocks, staging and writing vs. without decoding",
    "codec_fold": "folding eight deltas vs. apply_patch of one",
    "codec_nvcomp_ans_block": "nvCOMP's ANS behind blocks: compressing vs. decompressing",
    "codec_nvcomp_ans_gap": "the same behind the gaps of indices",
    "codec_nvcomp_zstd_block": "nvCOMP's Zstd behind blocks: compressing vs. decompressing",
    "codec_nvcomp_zstd_gap": "the same behind the gaps of indices",
    "adamw": "whole sync after an AdamW step vs. dense broadcast",
    "large": "whole sync of a large model",
    "large_over_dense": "whole sync of a large model vs. dense broadcast",
    "diff": "diff to indices, values and digests vs. a copy of the model",
    "diff_packed": "diff and packing vs. a copy of the model",
    "diff_over_usual": "the diff vs. nonzero on each parameter",
    "diff_host_snapshot": "diff against a host snapshot vs. copying it to the GPU",
    "apply_over_flat": "commit vs. one bare index_copy_",
    "apply_over_each": "commit vs. index_copy_ on each parameter",
    "apply_over_nan": "commit vs. NaN-masked load_weights",
    "memory_sender": "sender's memory beyond weights and snapshot vs. its bound",
    "memory_receiver": "receiver's memory beyond weights vs. its bound",
}
ENGINE_TITLES = {
    "engine_work_over_sparse": "all work of the engine vs. vLLM's sparse patches",
    "engine_work_over_dense": "all work of the engine vs. loading everything",
    "engine_pause_over_sparse": "the engine's pause vs. vLLM's sparse patches",
    "engine_pause_over_dense": "the engine's pause vs. loading everything",
    "engine_recording": "recording the loader, once",
}
SHARDED_TITLES = {
    "sharded_over_dense": "whole sync vs. gather and dense broadcast",
    "sharded_over_gathered": "whole sync vs. gathering sparse changes to rank 0",
    "sharded_pause": "the engines' pause vs. its goal",
    "sharded_large": "whole sync of a tensor-parallel trainer vs. its goal",
    "sharded_large_pause": "the engines' pause in it vs. its goal",
    "sharded_adamw_over_dense": "whole sync after an AdamW step vs. gather and dense broadcast",
    "sharded_adamw_over_gathered": "the same vs. gathering sparse changes to rank 0",
    "sharded_adamw_pause": "the engines' pause after an AdamW step vs. its goal",
}
VERL_TITLES = {
    "verl_over_bare": "verl's trainer to rollout vs. the transport alone, sending everything",
    "verl_over_sync": "the same vs. a sync of weights that stay in place",
    "verl_bytes": "bytes sent vs. a tenth of the model",
}
TYPICAL_DENSITY = 0.003
_ALL = TITLES | ENGINE_TITLES | SHARDED_TITLES | VERL_TITLES
_SWEEPS = (
    "sync_", "diff", "apply_", "codec_", "engine_work", "engine_pause", "sharded_over",
    "sharded_pause", "sharded_large",
)  # fmt: skip
_SWEPT = tuple(case for case in _ALL if case.startswith(_SWEEPS))
WAYS = {  # the cases of the dense and of the sparse baseline: their names
    ("sync_over_dense", "sync_over_usual"): ("dense broadcast", "per-parameter sparse"),
    ("sharded_over_dense", "sharded_over_gathered"): (
        "gather, dense broadcast",
        "sparse, gathered to rank 0",
    ),
}
_SUMMARY = (0.001, 0.003, 0.01, 0.05, 0.2, 1.0)  # densities that the README shows
_SEEN_BY = "vllm serve"
_BOLD = "A bold ratio misses its goal."
_COLUMNS = ("case", "model", "changed", "time", "baseline", "ratio", "goal", "met")


def make_table(results: Iterable[Result]) -> Table:
    """For a terminal."""
    ordered = _in_order(results)
    table = Table(*_COLUMNS, title="deltasync on GPUs" if _has_gpu(ordered) else "deltasync, toy")
    last = ""
    for result in ordered:
        if last and result.case != last:
            table.add_section()
        last = result.case
        table.add_row(*_cells(result), style=None if result.met else "red")
    return table


def make_markdown(results: list[Result]) -> str:
    """Goals and results, then whole syncs by density, then where they were measured."""
    ordered = _in_order(results)
    shown = [r for r in ordered if r.case not in _SWEPT or _is_typical(r, ordered)]
    environments = {describe(result.environment): None for result in ordered}
    links = {result.link: None for result in ordered if result.link}
    between = "" if "sharded_pause" in {r.case for r in ordered} else "Between two processes over "
    lines = [
        f"{between}{'; '.join(links)}. {_BOLD}" if links else _BOLD,
        "",
        row(_COLUMNS[:-1]),
        row("---" for _ in _COLUMNS[:-1]),
        *(row(_marked(result)) for result in shown),
        "",
        *_by_density(ordered),
        *environments,
    ]
    return "\n".join(lines)


def make_summary(results: list[Result], live: Iterable[Result] = ()) -> str:
    """The few figures that the README shows, and where they were measured.

    Args:
        results: Of two GPUs.
        live: Of running engines; those are shown that are synced over the same link.
    """
    dense = {r.density: r for r in _in_order(results) if r.case == "sync_over_dense"}
    usual = {r.density: r for r in results if r.case == "sync_over_usual"}
    shown = [dense[density] for density in _SUMMARY]
    everything, sparse = WAYS["sync_over_dense", "sync_over_usual"]
    rows = {
        "deltasync, whole sync": [r.seconds for r in shown],
        "deltasync, engine paused": [r.parts["pause_s"] for r in shown],
        everything: [r.baseline_seconds for r in shown],
        sparse: [usual[density].baseline_seconds for density in _SUMMARY],
    }
    over_it = (r for r in live if _SEEN_BY in r.model and r.link == shown[0].link)
    seen = {r.density: r for r in over_it if "gap_s" in r.parts}
    lines = [
        row(("changed elements", *(f"{100 * density:.3g} %" for density in _SUMMARY))),
        row(("---", *("---:" for _ in _SUMMARY))),
        *(row((name, *map(milliseconds, seconds))) for name, seconds in rows.items()),
        *([_seen_by_requests(seen)] if seen else []),
        "",
        f"{shown[0].model} in bf16 ({shown[0].numel / 1e9:.3g} B), over {shown[0].link}: "
        f"{describe(shown[0].environment)}",
    ]
    if seen:
        lines[-1] += f" Requests: {describe(next(iter(seen.values())).environment)}"
    return "\n".join(lines)


def _seen_by_requests(live: dict[float, Result]) -> str:
    """A row of the summary: gaps between tokens around a sync, and in brackets the usual ones."""
    cells = []
    for density in _SUMMARY:
        parts = live[density].parts if density in live else {}
        gap, usual = parts.get("gap_s"), parts.get("usual_gap_s")
        cells.append(f"{milliseconds(gap)} ({milliseconds(usual)})" if gap and usual else "")
    return row((f"longest gap between tokens of {_SEEN_BY} (and without a sync)", *cells))


def insert(page: str, name: str, text: str, images: Iterable[str] = ()) -> str:
    """`page` with images and `text` between the marks for `name`. Raises ValueError without."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"no place for {name}: {begin} ... {end}")
    shown = "".join(f"![{_alt(image)}]({image})\n\n" for image in images)
    return f"{head}{begin}\n\n{shown}{text}\n\n{end}{tail}"


def _alt(image: str) -> str:
    """What the image shows, by the end of its name."""
    return {
        "bytes": "Bytes per changed element by share of changed elements, with their bounds",
        "codec": "Times with payloads in blocks and without, by share of changed elements",
        "commit": "Receiver commit time by model size",
        "kernels": "Kernel times by share of changed elements",
        "requests": "Gaps between tokens, and tokens per second, with syncs and without",
        "sync": "Whole-sync time by share of changed elements",
    }[image.removesuffix(".svg").rpartition("-")[2]]


def ways_in(results: list[Result]) -> tuple[str, str] | None:
    """The cases (against everything dense, against sparse) of whole syncs, if they were run."""
    cases = {result.case for result in results}
    return next((ways for ways in WAYS if ways[0] in cases), None)


def _by_density(ordered: list[Result]) -> list[str]:
    """Milliseconds of whole syncs: one row a way, one column a density; a table for each link.

    A link with one density is in the table of cases already.
    """
    if (ways := ways_in(ordered)) is None:
        return []
    links = Counter(r.link for r in ordered if r.case == ways[0])
    shown = (link for link, densities in links.items() if densities > 1)
    tables = (_of_link([r for r in ordered if r.link == link], ways) for link in shown)
    return [line for table in tables for line in table]


def _of_link(ordered: list[Result], ways: tuple[str, str]) -> list[str]:
    dense, usual = ({r.density: r for r in ordered if r.case == case} for case in ways)
    everything, sparse = WAYS[ways]
    parts = {
        "of it compare": "diff_s",
        "of it pack, send, stage": "transfer_s",
        "of it commit": "commit_s",
        "engine paused": "pause_s",
    }
    rows = [
        ("deltasync", [milliseconds(r.seconds) for r in dense.values()]),
        *(
            (name, [milliseconds(r.parts[key]) for r in dense.values()])
            for name, key in parts.items()
        ),
        (everything, [milliseconds(r.baseline_seconds) for r in dense.values()]),
        (
            sparse,
            [milliseconds(usual[d].baseline_seconds) if d in usual else "" for d in dense],
        ),
        ("bytes deltasync sends", [megabytes(r.bytes) for r in dense.values()]),
    ]
    first = next(iter(dense.values()))
    return [
        f"Whole syncs of {first.model} by share of changed elements ({first.link}):",
        "",
        row(("", *(f"{100 * d:.3g} %" for d in dense))),
        row(("---", *("---:" for _ in dense))),
        *(row((name, *values)) for name, values in rows),
        "",
    ]


def _is_typical(result: Result, ordered: list[Result]) -> bool:
    """Of a sweep the record nearest to a typical density, with a goal if one has."""
    same = [
        r for r in ordered if (r.case, r.model, r.link) == (result.case, result.model, result.link)
    ]
    return result is min(same, key=lambda r: (r.goal is None, abs(r.density - TYPICAL_DENSITY)))


def _in_order(results: Iterable[Result]) -> list[Result]:
    order = list(_ALL)
    return sorted(results, key=lambda r: (order.index(r.case), r.link, r.numel, r.density))


def _has_gpu(results: list[Result]) -> bool:
    return any(result.environment.gpu for result in results)


def _marked(result: Result) -> list[str]:
    *texts, value, goal, _ = _cells(result)
    return [*texts, bold(value, unless=result.met), goal]


def _ranks(result: Result) -> str:
    """How many ranks of trainer and engine there were, if several."""
    found = ranks_of(result.link)
    return f", {found[0]} + {found[1]} ranks" if found else ""


def _cells(result: Result) -> tuple[str, ...]:
    """One row, in the order of the columns."""
    is_memory = result.ratio_is == MEMORY
    has_other = is_memory or result.baseline_seconds > 0 or result.ratio_is == PER_PARAMETER
    return (
        _ALL[result.case],
        f"{result.model}, {result.numel / 1e9:.3g} B{_ranks(result)}",
        f"{100 * result.density:.3g} %",
        mebibytes(result.bytes) if is_memory else milliseconds(result.seconds),
        mebibytes(result.bound_bytes) if is_memory else milliseconds(result.baseline_seconds),
        ratio(result, result.ratio) if has_other else "",
        "" if result.goal is None else f"{sign(result)} {ratio(result, result.goal)}",
        "" if result.goal is None else "yes" if result.met else "no",
    )
