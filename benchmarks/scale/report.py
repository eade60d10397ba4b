"""docs/scale.md: costs, errors and predictions as tables, and their picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots import STYLE, save
from benchmarks.record import ROOT
from benchmarks.report import describe, milliseconds, row
from benchmarks.scale import clusters, fit
from benchmarks.scale.clusters import MODELS, Prediction, predict
from benchmarks.scale.fanout import FanOut
from benchmarks.scale.fit import Error
from benchmarks.scale.model import Costs

PAGE = ROOT / "docs" / "scale.md"
IMAGE = ROOT / "docs" / "images" / "scale.svg"
LINK = "NCCL"  # whose costs predictions use
_UNITS = {
    "diff": (
        "fixed",
        "G elements of a rank",
        "M changes of a rank",
        "1,000 parameters",
        "if of several ranks",
    ),
    "transfer": ("fixed", "M changes", "G elements, dense", "1,000 parameters", "further rank"),
    "commit": ("fixed", "if staged", "M changes", "M sectors"),
    "rest": ("fixed", "1,000 parameters", "further rank"),
}
_SCALES = {"G": 1e9, "M": 1e6, "1": 1e3}


def sections(fan_out: FanOut) -> dict[str, str]:
    """Markdown by the name of its place in docs/scale.md."""
    costs = {link: fit.fit(link, fit.measured(link)) for link in fit.FILES}
    found = predictions(costs[LINK], fan_out)
    return {
        "scale-costs": _costs(costs, fan_out),
        "scale-errors": _errors(costs),
        "scale-near": _near(found),
    }


def predictions(costs: Costs, fan_out: FanOut) -> list[Prediction]:
    """Of each model on each cluster that has room for it."""
    pairs = ((model, gpus) for model in MODELS for gpus in clusters.GPUS)
    each = (predict(costs, fan_out.each_s, model, gpus) for model, gpus in pairs)
    return [one for one in each if one is not None]


def draw(fan_out: FanOut, path: Path = IMAGE) -> Path:
    """Left: what records say against what the model says. Right: clusters."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_errors(left)
        _draw_clusters(right, predictions(fit.fit(LINK, fit.measured(LINK)), fan_out))
        save(figure, path)
    return path


def _costs(costs: dict[str, Costs], fan_out: FanOut) -> str:
    lines = [row(("part", "for", *costs)), row(("---", "---", *("---:" for _ in costs)))]
    for part, units in _UNITS.items():
        for n, unit in enumerate(units):
            scale = next((_SCALES[key] for key in _SCALES if unit.startswith(key)), 1.0)
            values = (_cost(one.seconds[part][n] * scale) for one in costs.values())
            lines.append(row((part, unit, *values)))
    lines.append(row(("receivers", "engine rank", *(_cost(fan_out.each_s) for _ in costs))))
    machine = f"Engine ranks: {', '.join(map(str, fan_out.receivers))} of them, over shared memory"
    return "\n".join([*lines, "", f"{machine}: {describe(fan_out.environment)}"])


def _errors(costs: dict[str, Costs]) -> str:
    lines = [
        row(("link", "model", "ranks", "changed", "measured", "sync", "without it", "pause")),
        row(("---", "---", "---", *("---:" for _ in range(5)))),
    ]
    every = list[Error]()
    for link, one in costs.items():
        known, unknown = fit.errors(one, fit.measured(link)), fit.left_out(link)
        every += known
        lines += [row((link, *_error_cells(a, b))) for a, b in zip(known, unknown, strict=True)]
    off = [abs(error.sync) for error in every]
    pauses = [abs(error.pause) for error in every]
    text = (
        f"Of {len(every)} syncs, the predicted time is off by {100 * median(off):.0f} % in the "
        f"median and {100 * max(off):.0f} % at most, the pause by {100 * median(pauses):.0f} % and "
        f"{100 * max(pauses):.0f} %."
    )
    return "\n".join([text, "", *lines])


def _error_cells(known: Error, unknown: Error) -> tuple[str, ...]:
    work = known.measured.work
    return (
        known.measured.model,
        f"{work.trainers} + {work.engine}",
        f"{100 * work.changed / work.numel:.3g} %",
        milliseconds(known.measured.total),
        *(f"{100 * error:+.0f} %" for error in (known.sync, unknown.sync, known.pause)),
    )


def _near(found: Iterable[Prediction]) -> str:
    columns = (
        "model",
        "GPUs",
        "engines",
        "sync",
        "pause",
        "of the sync: messages to ranks",
    )
    lines = [row(columns), row(("---", *("---:" for _ in columns[1:])))]
    for one in found:
        times = (one.sync_s, one.pause_s, one.parts["receivers"])
        shown = map(_time, times)
        lines.append(row((one.model.name, f"{one.gpus:,}", f"{one.engines:,}", *shown)))
    return "\n".join(lines)


def _draw_errors(axes: Axes) -> None:
    for link, colour in zip(fit.FILES, ("#0b6e4f", "#3d7ea6"), strict=True):
        found = fit.measured(link)
        costs = fit.fit(link, found)
        times = [1e3 * one.total for one in found]
        said = [1e3 * costs.sync(one.work) for one in found]
        axes.scatter(times, said, s=22, color=colour, label=link, zorder=3)
    ends = (4.0, 200.0)
    axes.plot(ends, ends, color="#8a8a8a", linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured, ms", ylabel="predicted, ms", title="Whole syncs in the records")
    axes.legend(frameon=False)


def _draw_clusters(axes: Axes, found: Sequence[Prediction]) -> None:
    shades = mpl.colormaps["viridis"]
    for n, model in enumerate(MODELS):
        of_model = [one for one in found if one.model is model]
        colour = shades(0.9 * n / (len(MODELS) - 1))
        gpus = [one.gpus for one in of_model]
        axes.plot(gpus, [one.sync_s for one in of_model], "o-", color=colour, label=model.name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs of the cluster", ylabel="seconds")
    axes.set(title="Predicted syncs")
    axes.set_xticks(clusters.GPUS, [f"{one:,}" for one in clusters.GPUS])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)


def _cost(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds else "0"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
