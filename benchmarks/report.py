"""CPU records as a table for a terminal and as Markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from benchmarks.record import MEMORY, PER_PARAMETER, SPEED_UP, Environment, Result

TITLES = {
    "diff": "diff with values, speed relative to torch.ne + nonzero + gather",
    "diff_with_digests": "the same, with digests",
    "apply": "apply_patch, time relative to scatter_ with int64 indices",
    "commit": "receiver's commit vs. scatter_ with int64 indices",
    "sync_over_diff": "whole sync, time relative to its own diff with digests",
    "sync_over_dense": "whole sync, time relative to a sync with every chunk dense",
    "crossover": "the same, every chunk sparse",
    "parameter_sync": "whole sync of many small parameters",
    "parameter_sender": "the sender's CPU time for it",
    "parameter_receiver": "the receiver's CPU time for it",
    "memory_sender": "sender's memory beyond weights and snapshot vs. its bound",
    "memory_receiver": "receiver's memory beyond weights vs. its bound",
    "metrics_sender": "CPU time of Prometheus metrics, of a sync to eight engines at its sender",
    "metrics_receiver": "the same, at a receiver",
    "run_log": "CPU time of a line of a run log",
    "files": "diff of two checkpoint files vs. numpy reading and comparing them",
    "memory_files": "memory of the same command vs. its bound",
    "fleet_sender": "sender's CPU time with many engines, relative to one",
    "fleet_sync": "whole sync of many engines, relative to one",
    "fleet_cores": "the same, relative to the CPU time of all processes over the cores",
}
_BY_DENSITY = ("diff", "diff_with_digests", "apply", "sync_over_diff", "sync_over_dense")
_COLUMNS = ("case", "elements", "changed", "time", "baseline", "ratio", "goal", "met")


def make_table(results: Iterable[Result]) -> Table:
    """For a terminal."""
    table = Table(*_COLUMNS, title="deltasync on the CPU, one thread per process")
    last = ""
    order = list(TITLES)
    for result in sorted(results, key=lambda result: order.index(result.case)):
        if last and result.case != last:
            table.add_section()
        last = result.case
        style = None if result.met else "red"
        table.add_row(*cells(result), style=style)
    return table


def make_markdown(results: list[Result]) -> str:
    """Ratios by density, then the other cases, then where they were measured."""
    largest = max(result.numel for result in results if result.case in _BY_DENSITY)
    shown = [r for r in results if r.case in _BY_DENSITY and r.numel == largest]
    rest = [r for r in results if r.case not in _BY_DENSITY and r.case != "crossover"]
    environments = {describe(result.environment): None for result in results}
    lines = [
        f"One thread per process, {elements(largest)} bf16 elements. Figures are medians of "
        "ratios; a bold figure misses its goal.",
        "",
        *_by_density(shown),
        "",
        row(_COLUMNS[:-1]),
        row("---" for _ in _COLUMNS[:-1]),
        *(row(_marked(result)) for result in rest),
        "",
        *environments,
    ]
    return "\n".join(lines)


def _by_density(results: list[Result]) -> list[str]:
    """One row a case, one column a density."""
    densities = sorted({result.density for result in results})
    found = {(result.case, result.density): result for result in results}
    lines = [
        row(("", "goal", *(f"{100 * d:.3g} %" for d in densities))),
        row(("---", "---", *("---:" for _ in densities))),
    ]
    for case in _BY_DENSITY:
        if not (kept := [found[case, d] for d in densities if (case, d) in found]):
            continue
        values = (bold(f"{r.ratio:.2f}x", unless=r.met) for r in kept)
        lines.append(row((TITLES[case], _goals(kept), *values)))
    syncs = [found["sync_over_dense", d] for d in densities]
    lines.append(row(("whole sync", "", *(milliseconds(r.seconds) for r in syncs))))
    lines.append(row(("bytes sent", "", *(megabytes(r.bytes) for r in syncs))))
    return lines


def _goals(kept: list[Result]) -> str:
    """Each goal, with the density up to which it applies if it does not apply to all."""
    last = {r.goal: r.density for r in kept if r.goal is not None}
    texts = [
        f"{sign(kept[0])} {goal:g}"
        + ("" if density == kept[-1].density else f" to {100 * density:.3g} %")
        for goal, density in last.items()
    ]
    return ", ".join(texts)


def _marked(result: Result) -> list[str]:
    *texts, value, goal, _ = cells(result)
    return [*texts, bold(value, unless=result.met), goal]


def bold(text: str, *, unless: bool) -> str:
    return text if unless else f"**{text}**"


def cells(result: Result) -> tuple[str, ...]:
    """One row, in the order of the columns."""
    met = "" if result.goal is None else "yes" if result.met else "no"
    is_memory = result.ratio_is == MEMORY
    return (
        TITLES[result.case],
        elements(result.numel),
        f"{100 * result.density:.3g} %" if result.ratio_is != PER_PARAMETER else "1 element",
        mebibytes(result.bytes) if is_memory else milliseconds(result.seconds),
        mebibytes(result.bound_bytes) if is_memory else milliseconds(result.baseline_seconds),
        ratio(result, result.ratio),
        "" if result.goal is None else f"{sign(result)} {ratio(result, result.goal)}",
        met,
    )


def ratio(result: Result, value: float) -> str:
    match result.ratio_is:
        case "microseconds / parameter":
            return f"{value:.3g} us per parameter"
        case "microseconds / sync":
            return f"{value:.3g} us per sync"
        case "baseline_seconds / seconds":
            return f"{value:.2f}x as fast"
        case "seconds / baseline_seconds":
            return f"{value:.2f}x the time"
        case "bytes / bound_bytes":
            return f"{value:.2f} of the bound"


def describe(environment: Environment) -> str:
    """Where and of what code, in a sentence."""
    e = environment
    dirty = " with uncommitted changes" if e.dirty else ""
    gpu = f"{e.gpu}; " if e.gpu else ""
    return (
        f"{gpu}{e.cpu}, {e.cores} cores, {e.capability}; Python {e.python}, torch {e.torch}, "
        f"numpy {e.numpy}; commit {e.commit[:12]}{dirty}, {e.time[:10]}."
    )


def elements(numel: int) -> str:
    return f"{numel / (1 << 20):.3g} Mi"


def milliseconds(seconds: float) -> str:
    return (
        f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 2 if seconds < 0.01 else 1}f} ms"
        if seconds
        else ""
    )


def megabytes(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.3g} GB"
    return f"{num_bytes / 1e6:.3g} MB"


def mebibytes(num_bytes: int) -> str:
    mib = num_bytes / (1 << 20)
    return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"


def summary(environment: Environment) -> str:
    """The machine and the code, as short as a caption wants it."""
    e = environment
    changed = "+" if e.dirty else ""
    return f"{e.cpu}, {e.cores} cores, torch {e.torch}, commit {e.commit[:7]}{changed}"


def sign(result: Result) -> str:
    return ">=" if result.ratio_is == SPEED_UP else "<="


def row(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"
