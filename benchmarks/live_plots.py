"""Image of syncs of running engines: what requests see of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.plots import DENSE, SPARSE, STYLE, save
from benchmarks.record import Result
from benchmarks.report import describe

_SEVERAL, _KEPT = "#e0a458", "#7fb3d5"
_GAPS = (
    ("usual_gap_s", "without a sync", DENSE),
    ("gap_s", "a sync, in one call", SPARSE),
    ("kept_gap_s", "the same, old keys kept", _KEPT),
    ("several_gap_s", "a sync, in several calls", _SEVERAL),
)
_RATES = (
    ("before_tokens_per_s", "without syncs", DENSE),
    ("paced_tokens_per_s", "a sync each second", SPARSE),
    ("kept_paced_tokens_per_s", "the same, old keys kept", _KEPT),
    ("after_tokens_per_s", "without again", "#c9c9c9"),
)


def draw_all(results: Iterable[Result], folder: Path, *, name: str) -> list[Path]:
    """Draw engines with requests at the largest share that changed. Returns the files written."""
    found: dict[str, Result] = {}
    for result in results:
        if "gap_s" in result.parts and result.case == "live_changed":
            known = found.setdefault(result.model, result)
            found[result.model] = max(known, result, key=lambda one: one.density)
    if not found:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        path = folder / f"{name}-requests.svg"
        save(_drawn(list(found.values())), path)
    return [path]


def _drawn(results: list[Result]) -> Figure:
    figure = Figure(
        figsize=(10.5, 1.9 + 0.9 * len(results)), layout=ConstrainedLayoutEngine(wspace=0.06)
    )
    gaps, rates = figure.subplots(1, 2, sharey=True)
    share = 100 * results[0].density
    gaps.set_title(f"Longest time without a token, {share:g} % changed (ms)")
    _bars(gaps, results, _GAPS, scale=1e3)
    rates.set_title("Tokens per second")
    _bars(rates, results, _RATES, scale=1)
    for axes in (gaps, rates):
        axes.grid(axis="y", visible=False)
        axes.set_axisbelow(True)
        below = (-0.02, -0.02 - 0.2 / len(results))
        axes.legend(loc="upper left", bbox_to_anchor=below, frameon=False, fontsize=9)
    gaps.set_yticks(range(len(results)), [one.model.replace(", ", "\n") for one in results])
    gaps.invert_yaxis()
    figure.supxlabel(describe(results[0].environment), fontsize=7.5, color="#555555")
    return figure


def _bars(
    axes: Axes, results: list[Result], series: tuple[tuple[str, str, str], ...], *, scale: float
) -> None:
    series = tuple(one for one in series if all(one[0] in result.parts for result in results))
    height = 0.8 / len(series)
    for nth, (key, label, color) in enumerate(series):
        at = [row - 0.4 + height * (nth + 0.5) for row in range(len(results))]
        values = [scale * one.parts[key] for one in results]
        bars = axes.barh(at, values, height * 0.9, label=label, color=color)
        labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        axes.bar_label(bars, labels, padding=3, fontsize=8.5)
    axes.margins(x=0.14)
