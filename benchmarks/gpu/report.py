"""Records of GPU runs as a table for a terminal and as Markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from benchmarks.record import MEMORY, PER_PARAMETER, Result
from benchmarks.report import bold, describe, mebibytes, megabytes, milliseconds, ratio, row, sign

TITLES = {
    "sync_over_dense": "whole sync, against sending everything",
    "sync_over_usual": "whole sync, against sparse the usual way",
    "sync_diff": "of it: comparing",
    "sync_transfer": "of it: packing, sending, staging, checking",
    "sync_commit": "of it: from the decision to the last answer",
    "sync_receiver_commit": "in that: writing and reading back",
    "commit_growth": "receiver's commit of 2 Mi changes, against the smallest model",
    "moe_sync": "whole sync of 19,000 parameters, against as many bytes in 310",
    "adamw": "whole sync after an AdamW step, against sending everything",
    "large": "whole sync of a large model",
    "large_over_dense": "whole sync of a large model, against sending everything",
    "diff": "diff to indices, values and digests, against a copy of the model",
    "diff_packed": "diff and packing, against a copy of the model",
    "diff_over_usual": "the diff, against nonzero for each parameter",
    "diff_host_snapshot": "diff against a snapshot in host memory, against its copy to the GPU",
    "apply_over_flat": "commit, against one bare index_copy_",
    "apply_over_each": "the same, against index_copy_ for each parameter",
    "apply_over_nan": "the same, against NaN-masked load_weights",
    "memory_sender": "sender's memory beside weights and snapshot, against its bound",
    "memory_receiver": "receiver's memory beside weights, against its bound",
}
ENGINE_TITLES = {
    "engine_work_over_sparse": "all that an engine does, against vLLM's sparse patches",
    "engine_work_over_dense": "the same, against loading everything",
    "engine_pause_over_sparse": "of it what it pauses for, against vLLM's sparse patches",
    "engine_pause_over_dense": "the same, against loading everything",
    "engine_recording": "watching the loader, once",
    "engine_proof": "proving what updates reach, once, against copying the weights",
    "engine_proof_memory": "memory that this takes beside the model, against eight layers",
    "engine_upkeep": "commit with what has to follow in all layers, against one without",
}
SHARDED_TITLES = {
    "sharded_over_dense": "whole sync, against gathering and sending everything",
    "sharded_over_gathered": "whole sync, against gathering sparse changes to one rank",
    "sharded_pause": "of it what engines pause for",
    "sharded_adamw_over_dense": "whole sync after an AdamW step, against everything",
    "sharded_adamw_over_gathered": "the same, against gathering sparse changes",
    "sharded_adamw_pause": "of it what engines pause for",
}
VERL_TITLES = {
    "verl_over_bare": "verl's trainer to rollout, against sending everything and no more",
    "verl_over_sync": "the same, against a sync of weights that stay where they are",
    "verl_bytes": "bytes sent, against a tenth of everything",
}
TYPICAL_DENSITY = 0.003
_ALL = TITLES | ENGINE_TITLES | SHARDED_TITLES | VERL_TITLES
_SWEEPS = (
    "sync_", "diff", "apply_", "engine_work", "engine_pause", "sharded_over", "sharded_pause",
)  # fmt: skip
_SWEPT = tuple(case for case in _ALL if case.startswith(_SWEEPS))
WAYS = {  # (everything dense, sparse without deltasync): what to call them
    ("sync_over_dense", "sync_over_usual"): ("everything, packed", "sparse the usual way"),
    ("sharded_over_dense", "sharded_over_gathered"): (
        "everything, gathered first",
        "sparse, gathered to one rank",
    ),
}
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
    """Goals and what was measured, then everything by density, then where it was measured."""
    ordered = _in_order(results)
    shown = [r for r in ordered if r.case not in _SWEPT or _is_typical(r, ordered)]
    environments = {describe(result.environment): None for result in ordered}
    links = {result.link: None for result in ordered if result.link}
    between = "" if "sharded_pause" in {r.case for r in ordered} else "Between two processes over "
    lines = [
        f"{between}{', '.join(links)}. Bold misses its goal." if links else "Bold misses its goal.",
        "",
        row(_COLUMNS[:-1]),
        row("---" for _ in _COLUMNS[:-1]),
        *(row(_marked(result)) for result in shown),
        "",
        *_by_density(ordered),
        *environments,
    ]
    return "\n".join(lines)


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
    """What the picture shows, by the end of its name."""
    return {
        "commit": "Milliseconds of a receiver's commit against the size of the model",
        "kernels": "Times of the kernels against the share of changed elements",
        "sync": "Milliseconds of a whole sync against the share of changed elements",
    }[image.removesuffix(".svg").rpartition("-")[2]]


def ways_in(results: list[Result]) -> tuple[str, str] | None:
    """The cases (against everything dense, against sparse) of whole syncs, if they were run."""
    cases = {result.case for result in results}
    return next((ways for ways in WAYS if ways[0] in cases), None)


def _by_density(ordered: list[Result]) -> list[str]:
    """Milliseconds of whole syncs: one row a way, one column a density."""
    if (ways := ways_in(ordered)) is None:
        return []
    dense, usual = ({r.density: r for r in ordered if r.case == case} for case in ways)
    everything, sparse = WAYS[ways]
    parts = {
        "of it comparing": "diff_s",
        "of it packing, sending, staging": "transfer_s",
        "of it committing": "commit_s",
        "the engine's pause": "pause_s",
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
        ("bytes that deltasync sends", [megabytes(r.bytes) for r in dense.values()]),
    ]
    first = next(iter(dense.values()))
    return [
        f"Whole syncs of {first.model} by share of changed elements:",
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


def _cells(result: Result) -> tuple[str, ...]:
    """One row, in the order of the columns."""
    is_memory = result.ratio_is == MEMORY
    has_other = is_memory or result.baseline_seconds > 0 or result.ratio_is == PER_PARAMETER
    return (
        _ALL[result.case],
        f"{result.model}, {result.numel / 1e9:.3g} B",
        f"{100 * result.density:.3g} %",
        mebibytes(result.bytes) if is_memory else milliseconds(result.seconds),
        mebibytes(result.bound_bytes) if is_memory else milliseconds(result.baseline_seconds),
        ratio(result, result.ratio) if has_other else "",
        "" if result.goal is None else f"{sign(result)} {ratio(result, result.goal)}",
        "" if result.goal is None else "yes" if result.met else "no",
    )
