"""Image of timelines: a lane for each host and each GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.gpu.recording import LANES
from benchmarks.gpu.timeline import Timeline, totals
from benchmarks.plots import STYLE, save
from benchmarks.report import describe

_WAITING, _REST = "#e9e9e9", "#b9b9b9"
_COLOURS = (
    *("#3d7ea6", "#e0a458", "#b33951", "#0b6e4f", "#7a5195", "#c77d4f", "#2a9d8f", "#8d6b94"),
    *("#5f7c8a", "#d4a5a5", "#6a994e", "#bc6c25"),
)
_FEWEST = 0.045  # of the whole time: a span must be so long to carry its name
_HEIGHT = 0.72


def draw(timelines: Sequence[Timeline], folder: Path, *, name: str) -> list[Path]:
    """Draw them one above the other. Returns the files written."""
    if not timelines:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-lanes.svg"
    with mpl.rc_context(STYLE):
        save(_drawn(timelines), path)
    return [path]


def _drawn(timelines: Sequence[Timeline]) -> Figure:
    lanes = [lane for lane in LANES if any(s.lane == lane for t in timelines for s in t.spans)]
    colours = _colours(timelines)
    height = 1.1 + len(timelines) * (0.7 + 0.42 * len(lanes))
    figure = Figure(figsize=(12, height), layout="constrained")
    all_axes = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    for axes, timeline in zip(all_axes, timelines, strict=True):
        share, took = 100 * timeline.density, 1e3 * timeline.seconds
        axes.set_title(f"{share:g} % changed: {took:.2f} ms over {timeline.link}, noted as it ran")
        _draw_lanes(axes, timeline, lanes, colours)
    all_axes[-1].set_xlabel(f"ms\n{describe(timelines[0].environment)}", fontsize=7.5)
    legend = [Patch(color=colour, label=what) for what, colour in colours.items()]
    figure.legend(
        handles=[
            *legend,
            Patch(color=_WAITING, label="waiting"),
            Patch(color=_REST, label="other"),
        ],
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=8.5,
    )
    return figure


def _draw_lanes(axes: Axes, timeline: Timeline, lanes: list[str], colours: dict[str, str]) -> None:
    for span in timeline.spans:
        at, length = span.begin_ns / 1e6, (span.end_ns - span.begin_ns) / 1e6
        colour = colours.get(span.what, _WAITING if _is_waiting(span.what) else _REST)
        axes.barh(lanes.index(span.lane), length, _HEIGHT, left=at, color=colour, linewidth=0)
        if span.what in colours and length > _FEWEST * 1e3 * timeline.seconds:
            middle = at + length / 2, lanes.index(span.lane)
            fits = len(span.what) * 0.0075 * 1e3 * timeline.seconds < length
            if fits:
                axes.annotate(
                    span.what, middle, ha="center", va="center", fontsize=7.5, color="white"
                )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * timeline.seconds)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)


def _colours(timelines: Iterable[Timeline]) -> dict[str, str]:
    """Of what takes longest, by its name."""
    took: dict[str, int] = defaultdict(int)
    for timeline in timelines:
        for (_, what), length in totals(timeline).items():
            if what != "other" and not _is_waiting(what):
                took[what] += length
    longest = sorted(took, key=lambda what: -took[what])[: len(_COLOURS)]
    return dict(zip(longest, _COLOURS, strict=False))


def _is_waiting(what: str) -> bool:
    return what.startswith("wait ") or what == "NCCL"
