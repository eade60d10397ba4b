"""Draws the log of a run as one HTML page, which loads nothing and runs no script.

Names and messages in a log are untrusted: `escaped` and `_label` let only text through.
"""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from statistics import median, quantiles
from string import Template
from typing import TypeVar

import numpy as np

from deltasync.errors import ConfigError
from deltasync.observe.run_lines import Run
from deltasync.observe.series import Happening, Mark, Row, Series, series_of

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ModuleNotFoundError:
    raise ConfigError("reports are drawn by matplotlib: pip install matplotlib") from None

_LISTED = 200  # rows of a table
_LAYERS = 120  # rows of the heat map
_MOST_POINTS, _MOST_DOTS = 400, 60  # of a line
_LEAST = 1e-15  # smaller values count as 0, which a logarithmic scale does not show
_BLUE, _ORANGE, _RED, _GREEN = "#2f6db3", "#c9701a", "#c0303b", "#2b8a4b"
_GREY, _VIOLET = "#7d8590", "#7b52ab"
_LANES: dict[Mark, tuple[str, str]] = {
    "failed": ("failed", _RED),
    "recovered": ("recovered", _GREEN),
    "lost": ("lost", _ORANGE),
    "full": ("full sync", _BLUE),
    "joined": ("joined", _GREEN),
    "warning": ("warning", _ORANGE),
}
_SOURCES = {
    "sync": "Syncs of a sender",
    "publish": "Versions published to a store",
    "receive": "Syncs of receivers",
}
_PAUSES = {
    "sync": "From the decision until every receiver has committed.",
    "publish": "Publishing pauses no engine; a log of the receivers has their pauses.",
    "receive": "How long the engine had to pause for each sync.",
}

Text = Callable[[float], str]
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a chart: a value for each row, None where there is none."""

    name: str
    values: Sequence[float | None]
    colour: str = _BLUE
    style: str = "-"


def make_page(run: Run, title: str) -> str:
    """Return the whole HTML page of a log.

    Args:
        run: The log.
        title: Heading of the page, such as the name of the log. It is escaped.
    """
    series = series_of(run)
    parts = (
        _head(series, title),
        _tiles(series),
        _notes(run, series),
        *(_sections(series) if series.rows else ()),
        _happenings(series),
        _versions(series),
    )
    template = files("deltasync.observe").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escaped(title), body="\n".join(parts))


def _head(series: Series, title: str) -> str:
    parts = [_SOURCES[series.source]]
    if series.rows:
        first, last = series.rows[0], series.rows[-1]
        parts.append(f"{moment(first.time)} to {moment(last.time)} UTC")
    if series.releases:
        parts.append(f"deltasync {', '.join(series.releases)}")
    return f'<h1>{escaped(title)}</h1><p class="soft">{escaped("; ".join(parts))}</p>'


def _tiles(series: Series) -> str:
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{escaped(value)}<small>{escaped(more)}</small></dd></div>"
        for name, value, more in _facts(series)
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _facts(series: Series) -> Iterator[tuple[str, str, str]]:
    """(name, value, more) of each tile."""
    rows = series.rows
    span = f"v{rows[0].version} to v{rows[-1].version}" if rows else ""
    yield "Versions", f"{len(rows):,}", span
    sent, dense = sum(row.sent for row in rows), sum(row.dense or 0 for row in rows)
    more = f"{dense / sent:.3g}x less than all weights" if dense > 1.05 * sent > 0 else ""
    yield (
        "Bytes written" if series.source == "publish" else "Bytes to each receiver",
        size(sent),
        more,
    )
    if densities := [row.density for row in rows if row.density is not None]:
        span = f"{percent(min(densities))} to {percent(max(densities))}"
        yield "Density, median", percent(median(densities)), span
    for name, values in (
        ("Pause, median", [row.pause_s for row in rows if row.pause_s is not None]),
        ("Whole call, median", [row.total_s for row in rows if row.total_s is not None]),
    ):
        if values:
            high = quantiles(values, n=100)[98] if len(values) > 1 else values[0]
            yield name, seconds(median(values)), f"99 %: {seconds(high)}"
    errors = ", ".join(f"{name} {number}" for name, number in series.by_error.most_common(2))
    yield "Failed syncs", f"{series.num_failures:,}", errors
    yield "Receivers lost", f"{series.count('lost'):,}", ""
    yield "Full syncs", f"{series.count('full'):,}", "of receivers that joined"


def _notes(run: Run, series: Series) -> str:
    notes = []
    if run.skipped:
        first, why = run.skipped[0]
        lines = "1 line was" if len(run.skipped) == 1 else f"{len(run.skipped)} lines were"
        notes.append(f"{lines} skipped, the first is line {first}: {why}")
    if not series.rows:
        notes.append("No sync of this log has succeeded.")
    return "".join(f'<p class="note">{escaped(note)}</p>' for note in notes)


def _sections(series: Series) -> Iterator[str]:
    rows = series.rows
    where = "written to the store for each version" if series.source == "publish" else ""
    yield _lines(
        series,
        "Bytes of each version",
        f"Bytes {where or 'of payload that each receiver gets'}, on a logarithmic scale.",
        (
            _Line("sent", [row.sent for row in rows]),
            _Line("all weights", [row.dense for row in rows], _GREY, "--"),
        ),
        size,
    )
    yield _lines(
        series,
        "Density",
        "Share of the elements that a delta changes, on a logarithmic scale.",
        (_Line("density", [row.density for row in rows]),),
        percent,
    )
    yield _heat_map(series)
    yield _lines(
        series,
        "Pauses",
        _PAUSES[series.source],
        (
            _Line("pause", [row.pause_s for row in rows]),
            _Line("whole call", [row.total_s for row in rows], _VIOLET),
        ),
        seconds,
    )
    yield _marks(series)


def _lines(series: Series, title: str, text: str, lines: Iterable[_Line], shown: Text) -> str:
    """A chart of lines on a logarithmic scale; empty if there is nothing to draw.

    Of more versions than points: the median of some neighbours, within their least and largest.
    """
    drawn = [(line, _positive(line.values)) for line in lines]
    drawn = [(line, values) for line, values in drawn if np.isfinite(values).any()]
    if not drawn:
        return ""
    figure, axes = _figure(series, 2.5)
    places = np.array(_places(series), np.float64)
    for line, values in drawn:
        parts = np.array_split(np.arange(len(values)), min(len(values), _MOST_POINTS))
        parts = [part for part in parts if np.isfinite(values[part]).any()]
        middles = [places[part].mean() for part in parts]
        if len(values) > _MOST_POINTS:
            least, largest = (
                [end(values[part]) for part in parts] for end in (np.nanmin, np.nanmax)
            )
            axes.fill_between(middles, least, largest, color=line.colour, alpha=0.2)
        marker = "." if len(parts) <= _MOST_DOTS and line.style == "-" else None
        medians = [np.nanmedian(values[part]) for part in parts]
        axes.plot(middles, medians, line.style, c=line.colour, label=line.name, marker=marker)
    low, high = _ends(np.concatenate([values for _, values in drawn]))
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.grid(axis="y", color="#e2e5ea")
    if len(drawn) > 1:
        figure.legend(loc="outside lower left", ncols=len(drawn), frameon=False)
    return _section(title, text, figure)


def _heat_map(series: Series) -> str:
    title = "Density by layer"
    names, known = _layers(series)
    if not names:
        if not any(row.density is not None for row in series.rows):
            return ""
        return _section(title, 'Not in this log: SenderOptions(report_density="layer") adds it.')
    text = "Share of the elements that changed, by version and layer; empty where nothing did."
    if known > len(names):
        text += f" Of {known}, the {len(names)} that change most."
    values = np.stack(
        [_positive([row.density_by.get(name) for row in series.rows]) for name in names]
    )
    if not np.isfinite(values).any():
        return _section(title, "No layer has changed.")
    figure, axes = _figure(series, 0.9 + 0.17 * len(names))
    low, high = _ends(values)
    places = _places(series)
    picture = axes.imshow(
        values,
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        norm=LogNorm(low, high),
        extent=(places[0] - 0.5, places[-1] + 0.5, len(names) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(names)), list(map(_label, names)), fontsize=7, parse_math=False)
    bar = figure.colorbar(picture, ax=axes, fraction=0.03, pad=0.01)
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    return _section(title, text, figure)


def _layers(series: Series) -> tuple[list[str], int]:
    """The layers that the heat map has, in the order of the model, and how many there are."""
    sums: dict[str, float] = {}
    for row in series.rows:
        for name, density in row.density_by.items():
            sums[name] = sums.get(name, 0.0) + density
    most = set(sorted(sums, key=lambda name: -sums[name])[:_LAYERS])
    return [name for name in sums if name in most], len(sums)


def _marks(series: Series) -> str:
    title = "Failures and recoveries"
    marks = [mark for mark in _LANES if series.count(mark)]
    if not marks:
        return _section(title, "Nothing failed, and no receiver was lost.")
    figure, axes = _figure(series, 0.6 + 0.25 * len(marks))
    places = _places(series)
    for lane, mark in enumerate(marks):
        happened = [
            places[min(one.place, len(places) - 1)] for one in series.happenings if one.mark == mark
        ]
        axes.eventplot(happened, lineoffsets=-lane, linelengths=0.7, colors=_LANES[mark][1])
    axes.set_yticks([-lane for lane in range(len(marks))], [_LANES[mark][0] for mark in marks])
    axes.grid(axis="y", color="#e2e5ea")
    return _section(title, "Where they were; the table below says what they were.", figure)


def _figure(series: Series, height: float) -> tuple[Figure, Axes]:
    """A figure of this height, in inches, whose axes have the versions along it."""
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots()
    versions, first = [row.version for row in series.rows], _first(series)
    axes.set_xlim(first - 0.5, first + len(versions) - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(
        FuncFormatter(
            lambda place, _: (
                f"v{versions[int(place) - first]}"
                if 0 <= int(place) - first < len(versions)
                else ""
            )
        )
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors="#5c6675")
    return figure, axes


def _first(series: Series) -> int:
    """Where the first row is drawn: at its version, if matplotlib can tell that from the next."""
    version = series.rows[0].version
    return version if version < 1 << 40 else 0


def _places(series: Series) -> list[int]:
    """Where rows are drawn: one after another, since versions may begin again."""
    first = _first(series)
    return list(range(first, first + len(series.rows)))


def _positive(values: Iterable[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """float64 of these values; NaN for those that a logarithmic scale does not show."""
    found = np.array([np.nan if value is None else value for value in values], np.float64)
    found[~(found > _LEAST)] = np.nan
    return found


def _ends(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, float]:
    """The ends of a logarithmic scale for these values."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 1.15 if high / low > 3 else 2.0
    return low / margin, high * margin


def _section(title: str, text: str, figure: Figure | None = None) -> str:
    picture = ""
    if figure is not None:
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=125)
        source = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        picture = f'<div class="scroll"><img alt="{title}" src="{source}"></div>'
    return f'<h2>{title}</h2><p class="soft">{escaped(text)}</p>{picture}'


def _happenings(series: Series) -> str:
    head = ("time (UTC)", "version", "what", "who", "why")
    return _table(head, series.happenings, _cells_of_happening)


def _cells_of_happening(one: Happening) -> tuple[str, ...]:
    version = "" if one.version is None else f"v{one.version}"
    return moment(one.time), version, _LANES[one.mark][0], escaped(one.who, 100), escaped(one.text)


def _versions(series: Series) -> str:
    if not series.rows:
        return ""
    head = ("time (UTC)", "version", "bytes", "all weights", "density", "pause", "whole call")
    return f"<h2>Versions</h2>{_table(head, series.rows, _cells_of_row)}"


def _cells_of_row(row: Row) -> tuple[str, ...]:
    return (
        *(moment(row.time), f"v{row.version}", size(row.sent)),
        "" if row.dense is None else size(row.dense),
        "" if row.density is None else percent(row.density),
        "" if row.pause_s is None else seconds(row.pause_s),
        "" if row.total_s is None else seconds(row.total_s),
    )


def _table(
    head: Sequence[str], found: Sequence[_Item], cells: Callable[[_Item], Iterable[str]]
) -> str:
    """The last of these, the newest first; the texts of cells are escaped already."""
    if not found:
        return ""
    listed = found[-_LISTED:]
    note = f"The last {len(listed)} of {len(found):,}." if len(listed) < len(found) else ""
    titles = "".join(f"<th>{one}</th>" for one in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells(one))}</tr>" for one in reversed(listed)
    )
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f'<p class="soft">{note}</p><div class="scroll">{table}</div>'


def escaped(text: str, most: int = 500) -> str:
    """Text for HTML: nothing of it is markup, and what cannot be seen is a code."""
    if len(text) > most:
        text = f"{text[: most - 3]}..."
    return html.escape("".join(map(_visible, text)))


def _visible(character: str) -> str:
    if character == " " or not unicodedata.category(character).startswith(("C", "Z")):
        return character
    return f"\\u{ord(character):04x}"


def _label(name: str, most: int = 40) -> str:
    """A name for a chart: ASCII, of at most so many characters, with its middle left out."""
    name = "".join(map(_visible, name)).encode("ascii", "backslashreplace").decode()
    return name if len(name) <= most else f"{name[: most // 2 - 1]}..{name[-(most // 2 - 1) :]}"


def size(num_bytes: float) -> str:
    """Bytes, with three digits."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:.0f} {units[0]}"


def seconds(value: float) -> str:
    """A duration, with three digits."""
    if value >= 120:
        return f"{value / 3600:.3g} h" if value >= 7200 else f"{value / 60:.3g} min"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def percent(share: float) -> str:
    """A share of 1, with three digits."""
    return f"{share * 100:.3g} %"


def moment(unix_s: float) -> str:
    """A time, UTC."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "?"
