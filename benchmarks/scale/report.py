"""docs/scale.md: constants, errors, predictions and failures as tables, and their picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.codec import record as codec_record
from benchmarks.plots import STYLE, save
from benchmarks.record import ROOT
from benchmarks.report import describe, milliseconds, row
from benchmarks.scale import clusters, fit
from benchmarks.scale.clusters import MODELS, Prediction, far, predict
from benchmarks.scale.fanout import FanOut
from benchmarks.scale.fit import Error
from benchmarks.scale.model import Costs, Work
from benchmarks.scale.simulate import Fleet, Outcome, with_and_without_store

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
_LINKS = {"0.1 Gbit/s": 0.1e9 / 8, "1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8}
_CODERS = {"gap, ulp, zstd": "gap", "class": "class"}
_CORES = 16
_FLEETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as above", {}),
    ("ten times the failures", {"fails_every_s": 2.4 * 3600}),
    ("ten times the stalls", {"stall": 1e-4}),
    ("a step takes 10 s", {"step_s": 10.0}),
)


def sections(fan_out: FanOut) -> dict[str, str]:
    """Markdown by the name of its place in docs/scale.md."""
    costs = {link: fit.fit(link, fit.measured(link)) for link in fit.FILES}
    found = predictions(costs[LINK], fan_out)
    return {
        "scale-costs": _costs(costs, fan_out),
        "scale-errors": _errors(costs),
        "scale-near": _near(found),
        "scale-far": _far(),
        "scale-failures": _failures(costs[LINK], fan_out),
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
        "all weights",
    )
    lines = [row(columns), row(("---", *("---:" for _ in columns[1:])))]
    for one in found:
        times = (one.sync_s, one.pause_s, one.parts["receivers"], one.dense_s)
        shown = map(_time, times)
        lines.append(row((one.model.name, f"{one.gpus:,}", f"{one.engines:,}", *shown)))
    return "\n".join(lines)


def _far() -> str:
    codecs = _measured_codecs()
    columns = ("model", "link", "all weights", *codecs)
    lines = [row(columns), row(("---", "---", *("---:" for _ in columns[2:])))]
    for model in MODELS:
        for link, speed in _LINKS.items():
            found = far(model, speed, codecs, _CORES)
            cells = (f"{_size(one.num_bytes)}, {_time(one.seconds)}" for one in found)
            lines.append(row((model.name, link, *cells)))
    return "\n".join(lines)


def _measured_codecs() -> dict[str, tuple[float, float, float]]:
    """Bytes, and seconds to encode and to decode, for each change: 0.26 % changed."""
    kept = [
        record
        for record in codec_record.read_records(codec_record.RECORDS)
        if (record.kept, record.lr, record.steps, record.form) == ("masters", 3e-7, 1, "bfloat16")
        and record.coder in _CODERS
    ]
    return {
        _CODERS[record.coder]: (
            record.bytes / record.changed,
            median(record.encode_samples) / record.changed,
            median(record.decode_samples) / record.changed,
        )
        for record in kept
    }


def _failures(costs: Costs, fan_out: FanOut) -> str:
    model = MODELS[1]
    one = predict(costs, fan_out.each_s, model, clusters.GPUS[-1])
    assert one is not None
    whole = Work(
        numel=model.numel,
        parameters=model.parameters,
        changed=model.numel,
        is_dense=True,
        trainers=model.trainers,
        engine=model.engine,
    )
    full = max(costs.sync(whole), one.dense_s)
    fleet = Fleet(engines=1000, sync_s=one.sync_s, full_s=full)
    columns = (
        "",
        "all weights from",
        "sync, mean",
        "99th percentile",
        "serve the newest",
        "failures",
    )
    lines = [row(columns), row(("---", "---", *("---:" for _ in columns[2:])))]
    for name, changes in _FLEETS:
        outcomes = with_and_without_store(replace(fleet, **changes))
        for where, outcome in zip(("the trainer", "a store"), outcomes, strict=True):
            lines.append(row((name, where, *_outcome(outcome))))
    text = (
        f"{fleet.engines:,} engines of the {model.name} model, a sync of {_time(fleet.sync_s)} "
        f"each {fleet.step_s:.0f} s, all weights in {_time(fleet.full_s)}, a failure of each "
        f"engine every {fleet.fails_every_s / 3600:.0f} h, restarts of {fleet.restart_s:.0f} s, "
        f"one stall in {1 / fleet.stall:,.0f} syncs of an engine, dropped after "
        f"{fleet.timeout_s:.0f} s; 2,000 steps, seed 0:"
    )
    return "\n".join([text, "", *lines])


def _outcome(one: Outcome) -> Sequence[str]:
    share = f"{100 * one.serving:.2f} %"
    return _time(one.sync_s), _time(one.worst_s), share, f"{one.failures:,}"


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
        axes.plot(gpus, [one.dense_s for one in of_model], ":", color=colour)
    axes.set(xscale="log", yscale="log", xlabel="GPUs of the cluster", ylabel="seconds")
    axes.set(title="Predicted syncs; dotted: all weights")
    axes.set_xticks(clusters.GPUS, [f"{one:,}" for one in clusters.GPUS])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)


def _cost(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds else "0"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 3600:.2g} h"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e12:.3g} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"
