"""The pictures that pages show, made from records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks.record import Result
from benchmarks.report import WAYS, describe

_OURS, _DENSE, _USUAL, _REST = "#0b6e4f", "#8a8a8a", "#c77d4f", "#d9d9d9"
_SEVERAL, _KEPT = "#e0a458", "#7fb3d5"
_STYLE: dict[Any, Any] = {  # matplotlib types every key as a literal
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "svg.hashsalt": "deltasync",  # the same records make the same file
}
_PHASES = (  # (key of Result.parts, label, colour), from the bottom
    ("diff_s", "compare", "#3d7ea6"),
    ("transfer_s", "pack, send, stage, check", "#e0a458"),
    ("commit_s", "commit", "#b33951"),
)
_GAPS = (
    ("usual_gap_s", "without a sync", _DENSE),
    ("gap_s", "a sync, in one call", _OURS),
    ("kept_gap_s", "the same, old keys kept", _KEPT),
    ("several_gap_s", "a sync, in several calls", _SEVERAL),
)
_RATES = (
    ("before_tokens_per_s", "without syncs", _DENSE),
    ("paced_tokens_per_s", "a sync each second", _OURS),
    ("kept_paced_tokens_per_s", "the same, old keys kept", _KEPT),
    ("after_tokens_per_s", "without again", "#c9c9c9"),
)
_CODERS = {  # colour, style and width, from the most bytes to the least
    "int32 + value, zstd": ("#b9b9b9", "--", 1.3),
    "COO u8, u16 + value, zstd (PULSE v3.1)": ("#8a8a8a", "--", 1.3),
    "dense XOR, zstd (slime, SkyRL)": ("#e0a458", "--", 1.3),
    "u16 gap + XOR, zstd (NeMo-RL)": ("#b33951", "--", 1.3),
    "deltasync: block": ("#7fb8a4", "-", 2.0),
    "deltasync: gap, ulp, zstd": ("#3d7ea6", "-", 2.0),
    "deltasync: class": ("#0b6e4f", "-", 2.6),
}


def draw_all(records: Mapping[str, Sequence[Result]], folder: Path) -> list[Path]:
    """Draw what pages show of the records, by the name of their file. Returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(_STYLE):
        for name, kind, draw in (
            ("gpu-nccl", "sync", _sync),
            ("live-gpu", "requests", _requests),
            ("codec-cpu", "bytes", _bytes),
        ):
            if name in records:
                paths.append(folder / f"{name}-{kind}.svg")
                draw(records[name]).savefig(paths[-1], facecolor="white", metadata={"Date": None})
    return paths


def _sync(results: Sequence[Result]) -> Figure:
    """Left: whole syncs by density, and what else one would do. Right: the phases of ours."""
    ways = next(iter(WAYS))
    dense, usual = (
        sorted((r for r in results if r.case == case), key=lambda r: r.density) for case in ways
    )
    everything, sparse = WAYS[ways]
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title("Time of a whole sync (ms)")
    for rows, label, colour, style, width in (
        (usual, sparse, _USUAL, "-.", 1.8),
        (dense, everything, _DENSE, "--", 1.8),
        (dense, "deltasync", _OURS, "-", 2.6),
    ):
        taken = [1e3 * (r.seconds if colour == _OURS else r.baseline_seconds) for r in rows]
        densities = [100 * r.density for r in rows]
        left.plot(densities, taken, style, c=colour, lw=width, marker="o", ms=4, label=label)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    left.yaxis.set_minor_formatter("")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.legend(frameon=False, loc="best", fontsize=9.5)
    _shares(left, [100 * r.density for r in dense], "g")
    _phases(right, dense)
    e = dense[0].environment
    text = f"{dense[0].model}, {e.gpu}, {dense[0].link}; torch {e.torch}, commit {e.commit[:7]}"
    figure.supxlabel(text, fontsize=8, color="#666666", x=0.01, ha="left")
    return figure


def _phases(axes: Axes, rows: Sequence[Result]) -> None:
    axes.set_title("Where deltasync's time goes (ms)")
    bottom = [0.0] * len(rows)
    layers = [([1e3 * r.parts[key] for r in rows], label, c) for key, label, c in _PHASES]
    spent = [sum(values) for values in zip(*(values for values, _, _ in layers), strict=True)]
    rest = [max(0.0, 1e3 * r.seconds - s) for r, s in zip(rows, spent, strict=True)]
    for values, label, colour in (*layers, (rest, "the rest", _REST)):
        axes.bar(range(len(rows)), values, 0.72, bottom, color=colour, label=label)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set_xticks(range(len(rows)), [f"{100 * r.density:g}" for r in rows])
    axes.set_xlabel("changed elements (%)")
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", fontsize=9.5, reverse=True)


def _requests(results: Sequence[Result]) -> Figure:
    """What requests see of syncs, at the largest share that changed."""
    by_model: dict[str, Result] = {}
    for result in sorted(results, key=lambda one: one.density):
        if "gap_s" in result.parts and result.case == "live_changed":
            by_model[result.model] = result
    found = [by_model[name] for name in dict.fromkeys(r.model for r in results) if name in by_model]
    size = (10.5, 1.9 + 0.9 * len(found))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.06))
    gaps, rates = figure.subplots(1, 2, sharey=True)
    gaps.set_title(f"Longest time without a token, {100 * found[0].density:g} % changed (ms)")
    _bars(gaps, found, _GAPS, scale=1e3)
    rates.set_title("Tokens per second")
    _bars(rates, found, _RATES, scale=1)
    gaps.set_yticks(range(len(found)), [one.model.replace(", ", "\n") for one in found])
    gaps.invert_yaxis()
    figure.supxlabel(describe(found[0].environment), fontsize=7.5, color="#555555")
    return figure


def _bars(
    axes: Axes, results: list[Result], series: tuple[tuple[str, str, str], ...], *, scale: float
) -> None:
    height = 0.8 / len(series)
    for nth, (key, label, color) in enumerate(series):
        at = [row - 0.4 + height * (nth + 0.5) for row in range(len(results))]
        values = [scale * one.parts[key] for one in results]
        bars = axes.barh(at, values, height * 0.9, label=label, color=color)
        labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        axes.bar_label(bars, labels, padding=3, fontsize=8.5)
    axes.margins(x=0.14)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    below = (-0.02, -0.02 - 0.2 / len(results))
    axes.legend(loc="upper left", bbox_to_anchor=below, frameon=False, fontsize=9)


def _bytes(results: Sequence[Result]) -> Figure:
    """Bytes per change against the share that changed, of fp32 masters."""
    plain = [r for r in results if r.model.startswith("masters") and r.model.count("-") == 3]
    figure = Figure(figsize=(10.5, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_title("One step between syncs, by learning rate")
    _coders(left, [r for r in plain if r.model.endswith("-k1")], lambda rate, _: rate)
    right.set_title("By steps between syncs, learning rate 1e-6")
    _coders(right, [r for r in plain if "-1e-6-" in r.model], lambda _, steps: f"k={steps}")
    left.set_ylabel("bytes per changed element")
    left.set_ylim(0, 5.5)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    e = plain[0].environment
    text = f"{plain[0].numel / 1e6:.0f} M bf16 elements, fp32 masters; {e.cpu}, {e.cores} cores, "
    text += f"torch {e.torch}, commit {e.commit[:7]}"
    figure.suptitle(text, fontsize=8, color="#666666", x=0.01, ha="left")
    return figure


def _coders(axes: Axes, results: Sequence[Result], label_of: Callable[[str, str], str]) -> None:
    """Lines of coders, and what each point is along the top."""
    results = sorted(results, key=lambda result: result.density)
    for coder, (colour, style, width) in _CODERS.items():
        rows = [result for result in results if result.way == coder]
        points = [100 * r.density for r in rows], [r.ratio for r in rows]
        axes.plot(*points, style, color=colour, lw=width, marker="o", ms=1.6 * width, label=coder)
    for row in rows:
        rate, steps = row.model.removeprefix("masters-").split("-k")
        at = (100 * row.density, 5.3)
        axes.annotate(label_of(rate, steps), at, ha="center", fontsize=8, color="#666666")
    _shares(axes, [100 * r.density for r in rows], ".2g")


def _shares(axes: Axes, percents: Sequence[float], form: str) -> None:
    """Changed elements across, on a log scale."""
    axes.set_xscale("log")
    axes.set_xticks(percents, [f"{percent:{form}}" for percent in percents])
    axes.tick_params(axis="x", which="minor", length=0)
    axes.xaxis.set_minor_formatter("")
    axes.grid(visible=False, which="minor")
    axes.set_xlabel("changed elements (%)")
