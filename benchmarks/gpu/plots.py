"""Images made from records of GPU runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks.gpu.report import WAYS, ways_in
from benchmarks.plots import DENSE, SPARSE, STYLE, density_axis, finish, line, save
from benchmarks.record import Result
from benchmarks.sharded.plan import ranks_of

_USUAL, _REST = "#c77d4f", "#d9d9d9"
_PHASES = (  # (key of Result.parts, label, colour), from the bottom
    ("diff_s", "compare", "#3d7ea6"),
    ("transfer_s", "pack, send, stage, check", "#e0a458"),
    ("commit_s", "commit", "#b33951"),
)

_CODED = (  # titles, and what is coded and what is not
    ("Trainer: diff and payload (ms)", "coded in blocks", "not coded"),
    ("Engine: stage and write (ms)", "decoded from blocks", "not coded"),
)


def draw_all(results: list[Result], folder: Path, *, name: str) -> list[Path]:
    """Draw what the records allow, into files that begin with `name`. Returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        figures = {"sync": _sync, "commit": _commit, "codec": _codec}
        for kind, figure in ((kind, make(results)) for kind, make in figures.items()):
            if figure is not None:
                paths.append(folder / f"{name}-{kind}.svg")
                save(figure, paths[-1])
    return paths


def _sync(results: list[Result]) -> Figure | None:
    """Left: whole syncs by density, and what else one would do. Right: the phases of ours."""
    if (ways := ways_in(results)) is None:
        return None
    links = {r.link for r in results if r.case == ways[0]}
    most = max(links, key=lambda link: ranks_of(link) or ())
    here = [r for r in results if r.link == most]
    dense, usual = (_sweep(here, case) for case in ways)
    everything, sparse = WAYS[ways]
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title("Time of a whole sync (ms)")
    line(left, usual, [1e3 * r.baseline_seconds for r in usual], sparse, _USUAL, "-.")
    line(left, dense, [1e3 * r.baseline_seconds for r in dense], everything, DENSE, "--")
    line(left, dense, [1e3 * r.seconds for r in dense], "deltasync", SPARSE, width=2.6)
    finish(left, "{:,.4g}")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    density_axis(left, dense)
    _draw_phases(right, dense)
    _caption(figure, dense[0])
    return figure


def _draw_phases(axes: Axes, rows: list[Result]) -> None:
    axes.set_title("Where deltasync's time goes (ms)")
    bottom = [0.0] * len(rows)
    for key, label, colour in _PHASES:
        values = [1e3 * r.parts[key] for r in rows]
        _stack(axes, values, bottom, label, colour)
    rest = [max(0.0, 1e3 * r.seconds - low) for r, low in zip(rows, bottom, strict=True)]
    _stack(axes, rest, bottom, "the rest", _REST)
    axes.set_xticks(range(len(rows)), [f"{100 * r.density:g}" for r in rows])
    axes.set_xlabel("changed elements (%)")
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", fontsize=9.5, reverse=True)


def _stack(
    axes: Axes, values: Sequence[float], bottom: list[float], label: str, colour: str
) -> None:
    """One layer of bars; `bottom` is raised by it."""
    axes.bar(range(len(values)), values, 0.72, bottom, color=colour, label=label)
    bottom[:] = [low + value for low, value in zip(bottom, values, strict=True)]


def _commit(results: list[Result]) -> Figure | None:
    """The receiver's commit of as many changes in larger and larger models."""
    rows = sorted((r for r in results if r.case == "commit_growth"), key=lambda r: r.numel)
    if len(rows) < 2:
        return None
    figure = Figure(figsize=(5.6, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Commit of {rows[0].changed / 1e6:.2g} M changed elements (ms)")
    sizes, times = [r.numel / 1e9 for r in rows], [1e3 * r.seconds for r in rows]
    axes.plot(sizes, times, color=SPARSE, lw=2.6, marker="o", ms=5)
    axes.axhspan(0.9 * times[0], 1.1 * times[0], color=SPARSE, alpha=0.12, lw=0)
    axes.annotate(
        "within 10 % of the smallest",
        (sizes[-1], 0.9 * times[0]),
        xytext=(0, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color="#666666",
    )
    axes.set_ylim(0, 1.45 * max(times))
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlabel("elements of the model (billions)")
    _caption(figure, rows[0])
    return figure


def _codec(results: list[Result]) -> Figure | None:
    """What coding in blocks adds, by density. Left: at the trainer. Right: at the engine."""
    encode, write = (_sweep(results, f"codec_block_{what}") for what in ("encode", "write"))
    if len(encode) < 2 or len(write) < 2:
        return None
    figure = Figure(figsize=(10.5, 4.0), layout="constrained")
    sides = zip(figure.subplots(1, 2), (encode, write), _CODED, strict=True)
    for axes, rows, (title, mine, theirs) in sides:
        axes.set_title(title)
        line(axes, rows, [1e3 * r.baseline_seconds for r in rows], theirs, DENSE, "--")
        line(axes, rows, [1e3 * r.seconds for r in rows], mine, SPARSE, width=2.6)
        finish(axes, "{:,.4g}")
        density_axis(axes, rows)
    _caption(figure, encode[0])
    return figure


def _sweep(results: list[Result], case: str) -> list[Result]:
    """The records of a case of the model that has most of them, by density."""
    rows = [r for r in results if r.case == case]
    models = [r.model for r in rows]
    most = max(models, key=models.count, default="")
    return sorted((r for r in rows if r.model == most), key=lambda r: r.density)


def _caption(figure: Figure, result: Result) -> None:
    e = result.environment
    where = e.gpu or e.cpu
    changed = "+" if e.dirty else ""
    what = f"{result.model}, " if result.case != "commit_growth" else ""
    text = f"{what}{where}, {result.link}; torch {e.torch}, commit {e.commit[:7]}{changed}"
    figure.supxlabel(text, fontsize=8, color="#666666", x=0.01, ha="left")
