"""The table of syncs of running engines."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from benchmarks.record import Result
from benchmarks.report import describe, row

_COLUMNS = (
    *("engine", "sync", "whole sync", "calls", "staging", "write"),
    *("longest gap between tokens", "with keys kept", "usual gap"),
    *("tokens/s without syncs", "with one each second", "with keys kept", "without again"),
)
_RATES = ("before", "paced", "kept_paced", "after")
_SAID = (
    "Medians of syncs by turns; in brackets, with updates in several calls. The gaps are the "
    "longest without a token of any request: around a sync, and in 0.1 s before it. After a sync, "
    "vLLM recomputes the keys and values of running requests, unless they are kept."
)


def make_table(results: list[Result]) -> Table:
    """For a terminal."""
    table = Table(*_COLUMNS, title=_SAID)
    for result in results:
        table.add_row(*_cells(result))
    return table


def make_markdown(results: list[Result]) -> str:
    """For docs/performance.md."""
    environments = {describe(result.environment): None for result in results}
    lines = [row(_COLUMNS), row("---" for _ in _COLUMNS)]
    lines += [row(_cells(result)) for result in results]
    return "\n".join([_SAID, "", *lines, "", *environments])


def _cells(result: Result) -> Iterator[str]:
    parts = result.parts
    if result.case == "live_reload":
        took = f"{result.baseline_seconds:.3g} s"
        yield from (result.model, "all, by vLLM's own reload", took, *[""] * (len(_COLUMNS) - 3))
        return

    def both(key: str, scale: float = 1e3, unit: str = " ms") -> str:
        if key not in parts:
            return ""
        return f"{parts[key] * scale:.3g} ({parts[f'several_{key}'] * scale:.3g}){unit}"

    def rate(key: str) -> str:
        return f"{parts[key]:.0f}" if key in parts and result.density else ""

    case = "nothing" if result.case == "live_unchanged" else f"{100 * result.density:g} % changed"
    yield from (result.model, case, both("total_s"), both("calls", 1, ""))
    yield from map(both, ("staging_s", "write_s", "gap_s"))
    kept = parts.get("kept_gap_s")
    yield "" if kept is None else f"{1e3 * kept:.3g} ms"
    yield both("usual_gap_s")
    yield from map(rate, (f"{key}_tokens_per_s" for key in _RATES))
