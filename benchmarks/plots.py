"""Images made from records: seconds and bytes of a sync against the share that changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.record import Result
from benchmarks.report import elements, summary

SPARSE, DENSE = "#0b6e4f", "#8a8a8a"
_PARTS = (  # (key of Result.parts, label, colour)
    ("diff_s", "find the changes", "#3d7ea6"),
    ("transfer_s", "send, check, stage", "#e0a458"),
    ("pause_s", "engine paused", "#b33951"),
)
STYLE: dict[Any, Any] = {  # matplotlib types every key as a literal
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


def draw_all(results: Iterable[Result], folder: Path) -> list[Path]:
    """Draw what the records allow. Returns the files written."""
    kept = list(results)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, figure in (("cpu-sync.svg", _sync(kept)), ("cpu-kernels.svg", _kernels(kept))):
            if figure is not None:
                paths.append(folder / name)
                save(figure, paths[-1])
    return paths


def save(figure: Figure, path: Path) -> None:
    """The same records make the same file."""
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def _sync(results: list[Result]) -> Figure | None:
    """Left: seconds of a sync and of its parts. Right: bytes."""
    sparse = _series(results, "sync_over_diff")
    dense = _series(results, "sync_over_dense")
    if not sparse or not dense:
        return None
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    seconds, num_bytes = figure.subplots(1, 2)
    _draw_seconds(seconds, sparse, dense)
    _draw_bytes(num_bytes, dense)
    for axes in (seconds, num_bytes):
        density_axis(axes, sparse)
    _caption(figure, sparse[0], "two processes, shared memory")
    return figure


def _draw_seconds(axes: Axes, sparse: list[Result], dense: list[Result]) -> None:
    axes.set_title("Time of a whole sync (ms)")
    line(axes, dense, [1e3 * r.baseline_seconds for r in dense], "everything dense", DENSE, "--")
    line(axes, sparse, [1e3 * r.seconds for r in sparse], "deltasync", SPARSE, width=2.6)
    for key, label, colour in _PARTS:
        line(axes, sparse, [1e3 * r.parts[key] for r in sparse], label, colour, width=1.3)
    finish(axes, "{:,.4g}")


def _draw_bytes(axes: Axes, dense: list[Result]) -> None:
    axes.set_title("Bytes of a sync (MB)")
    line(axes, dense, [r.bound_bytes / 1e6 for r in dense], "everything dense", DENSE, "--")
    line(axes, dense, [r.bytes / 1e6 for r in dense], "deltasync", SPARSE, width=2.6)
    finish(axes, "{:,.4g}")


def _kernels(results: list[Result]) -> Figure | None:
    """Diff and apply beside plain torch."""
    series = [
        (
            _series(results, "diff"),
            "Find indices and values (ms)",
            "deltasync",
            "torch.ne + nonzero + gather",
        ),
        (
            _series(results, "apply"),
            "Apply a patch (ms)",
            "apply_patch, checks included",
            "bare scatter_",
        ),
    ]
    if not all(rows for rows, *_ in series):
        return None
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    for axes, (rows, title, ours, theirs) in zip(figure.subplots(1, 2), series, strict=True):
        axes.set_title(title)
        line(axes, rows, [1e3 * r.baseline_seconds for r in rows], theirs, DENSE, "--")
        line(axes, rows, [1e3 * r.seconds for r in rows], ours, SPARSE, width=2.6)
        finish(axes, "{:,.4g}")
        density_axis(axes, rows)
    _caption(figure, series[0][0][0], "one thread")
    return figure


def _series(results: list[Result], case: str) -> list[Result]:
    """The records of a case at its largest size, by density."""
    rows = [r for r in results if r.case == case]
    largest = max((r.numel for r in rows), default=0)
    return sorted((r for r in rows if r.numel == largest), key=lambda r: r.density)


def line(
    axes: Axes,
    rows: list[Result],
    values: Sequence[float],
    label: str,
    colour: str,
    style: str = "-",
    *,
    width: float = 1.8,
) -> None:
    densities = [r.density for r in rows]
    axes.plot(
        densities, values, style, color=colour, lw=width, marker="o", ms=1.6 * width, label=label
    )


def finish(axes: Axes, form: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    axes.yaxis.set_minor_formatter("")
    axes.legend(frameon=False, loc="best", fontsize=9.5)


def density_axis(axes: Axes, rows: list[Result]) -> None:
    axes.set_xscale("log")
    ticks = [r.density for r in rows]
    axes.set_xticks(ticks, [f"{100 * tick:g}" for tick in ticks])
    axes.tick_params(axis="x", which="minor", length=0)
    axes.xaxis.set_minor_formatter("")
    axes.grid(visible=False, which="minor")
    axes.set_xlabel("changed elements (%)")


def _caption(figure: Figure, result: Result, how: str) -> None:
    text = f"{elements(result.numel)} bf16 elements, {how}; {summary(result.environment)}"
    figure.supxlabel(text, fontsize=8, color="#666666", x=0.01, ha="left")
