"""Draws the log of a run as one HTML page, which loads nothing and runs no script.

Names and messages in a log are untrusted: `escaped` and `_label` let only text through.
"""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from statistics import median, quantiles
from string import Template

import numpy as np

from deltasync.errors import ConfigError
from deltasync.observe.run_lines import Mark, Run

try:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ModuleNotFoundError:
    raise ConfigError("reports are drawn by matplotlib: pip install matplotlib") from None

_LISTED = 200  # rows of a table
_LAYERS = 120  # rows of the heat map
_MOST_DOTS = 60  # of a line
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

_Values = list[float | None]


def make_page(run: Run, title: str) -> str:
    """Return the whole HTML page of a log.

    Args:
        run: The log.
        title: Heading of the page, such as the name of the log. It is escaped.
    """
    body = "\n".join((_head(run, title), *_notes(run), *_charts(run), *_tables(run)))
    template = files("deltasync.observe").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escaped(title), body=body)


def _head(run: Run, title: str) -> str:
    parts = [_SOURCES[run.source]]
    if run.rows:
        parts.append(f"{moment(run.rows[0].time)} to {moment(run.rows[-1].time)} UTC")
    if releases := dict.fromkeys(line.deltasync for line in run.lines if line.event == "run"):
        parts.append(f"deltasync {', '.join(releases)}")
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{escaped(value)}<small>{escaped(more)}</small></dd></div>"
        for name, value, more in _facts(run)
    )
    soft = escaped("; ".join(parts))
    return f'<h1>{escaped(title)}</h1><p class="soft">{soft}</p><dl class="tiles">{tiles}</dl>'


def _facts(run: Run) -> Iterator[tuple[str, str, str]]:
    """(name, value, more) of each tile."""
    rows = run.rows
    yield "Versions", f"{len(rows):,}", f"v{rows[0].version} to v{rows[-1].version}" if rows else ""
    sent, dense = sum(row.sent for row in rows), sum(row.dense_bytes or 0 for row in rows)
    more = f"{dense / sent:.3g}x less than all weights" if dense > 1.05 * sent > 0 else ""
    yield "Bytes written" if run.source == "publish" else "Bytes to each receiver", size(sent), more
    for name, shown, found in (
        ("Density", percent, [row.density for row in rows]),
        ("Pause", seconds, [row.pause for row in rows]),
        ("Whole call", seconds, [row.total_s for row in rows]),
    ):
        if values := [value for value in found if value is not None]:
            high = quantiles(values, n=100)[98] if len(values) > 1 else values[0]
            yield f"{name}, median", shown(median(values)), f"99 %: {shown(high)}"
    errors = ", ".join(f"{name} {number}" for name, number in run.failures.most_common(2))
    yield "Failed syncs", f"{run.failures.total():,}", errors
    yield "Receivers lost", f"{run.count('lost'):,}", ""
    yield "Full syncs", f"{run.count('full'):,}", "of receivers that joined"


def _notes(run: Run) -> Iterator[str]:
    if run.skipped:
        first, why = run.skipped[0]
        lines = "1 line was" if len(run.skipped) == 1 else f"{len(run.skipped)} lines were"
        text = f"{lines} skipped, the first is line {first}: {why}"
        yield f'<p class="note">{escaped(text)}</p>'
    if not run.rows:
        yield '<p class="note">No sync of this log has succeeded.</p>'


def _charts(run: Run) -> Iterator[str]:
    rows = run.rows
    if not rows:
        return
    yield _lines(
        run,
        "Bytes of each version",
        "Bytes of each version and of all weights, on a logarithmic scale.",
        {"sent": [row.sent for row in rows], "all weights": [row.dense_bytes for row in rows]},
        size,
    )
    yield _lines(
        run,
        "Density",
        "Share of the elements that a delta changes, on a logarithmic scale.",
        {"density": [row.density for row in rows]},
        percent,
    )
    yield _heat_map(run)
    yield _lines(
        run,
        "Pauses",
        _PAUSES[run.source],
        {"pause": [row.pause for row in rows], "whole call": [row.total_s for row in rows]},
        seconds,
    )
    yield _marks(run)


def _lines(
    run: Run, title: str, text: str, lines: dict[str, _Values], shown: Callable[[float], str]
) -> str:
    """A chart of lines on a logarithmic scale; empty if there is nothing to draw."""
    drawn = {name: _positive(values) for name, values in lines.items()}
    drawn = {name: values for name, values in drawn.items() if np.isfinite(values).any()}
    if not drawn:
        return ""
    figure, axes = _figure(run, 2.5)
    marker = "." if len(run.rows) <= _MOST_DOTS else None
    styles = {"all weights": ("--", _GREY, None), "whole call": ("-", _VIOLET, marker)}
    for name, values in drawn.items():
        style, colour, dots = styles.get(name, ("-", _BLUE, marker))
        axes.plot(_places(run), values, style, c=colour, label=name, marker=dots)
    low, high = _ends(np.concatenate(list(drawn.values())))
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    _mark_scale(axes.yaxis, low, high, shown)
    axes.grid(axis="y", color="#e2e5ea")
    if len(drawn) > 1:
        figure.legend(loc="outside lower left", ncols=len(drawn), frameon=False)
    return _section(title, text, figure)


def _heat_map(run: Run) -> str:
    title = "Density by layer"
    names, known = _layers(run)
    if not names:
        if not any(row.density is not None for row in run.rows):
            return ""
        return _section(title, 'Not in this log: SenderOptions(report_density="layer") adds it.')
    text = "Share of the elements that changed, by version and layer; empty where nothing did."
    if known > len(names):
        text += f" Of {known}, the {len(names)} that change most."
    values = np.stack([_positive([row.density_by.get(name) for row in run.rows]) for name in names])
    if not np.isfinite(values).any():
        return _section(title, "No layer has changed.")
    figure, axes = _figure(run, 0.9 + 0.17 * len(names))
    low, high = _ends(values)
    places = _places(run)
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
    _mark_scale(bar.ax.yaxis, low, high, percent)
    return _section(title, text, figure)


def _layers(run: Run) -> tuple[list[str], int]:
    """The layers that the heat map has, in the order of the model, and how many there are."""
    sums = Counter[str]()
    for row in run.rows:
        sums.update(row.density_by)
    most = {name for name, _ in sums.most_common(_LAYERS)}
    return [name for name in sums if name in most], len(sums)


def _marks(run: Run) -> str:
    title = "Failures and recoveries"
    marks = [mark for mark in _LANES if run.count(mark)]
    if not marks:
        return _section(title, "Nothing failed, and no receiver was lost.")
    figure, axes = _figure(run, 0.6 + 0.25 * len(marks))
    places = _places(run)
    for lane, mark in enumerate(marks):
        happened = [
            places[min(one.place, len(places) - 1)] for one in run.happenings if one.mark == mark
        ]
        axes.eventplot(happened, lineoffsets=-lane, linelengths=0.7, colors=_LANES[mark][1])
    axes.set_yticks([-lane for lane in range(len(marks))], [_LANES[mark][0] for mark in marks])
    axes.grid(axis="y", color="#e2e5ea")
    return _section(title, "Where they were; the table below says what they were.", figure)


def _figure(run: Run, height: float) -> tuple[Figure, Axes]:
    """A figure of this height, in inches, whose axes have the versions along it."""
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots()
    labels = {place: f"v{row.version}" for place, row in zip(_places(run), run.rows, strict=True)}
    axes.set_xlim(min(labels) - 0.5, max(labels) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: labels.get(int(place), "")))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors="#5c6675")
    return figure, axes


def _places(run: Run) -> range:
    """Where rows are drawn: one after another, since versions may begin again.

    The first one is at its version, if matplotlib can tell that from the next.
    """
    version = run.rows[0].version or 0
    first = version if version < 1 << 40 else 0
    return range(first, first + len(run.rows))


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


def _mark_scale(axis: Axis, low: float, high: float, shown: Callable[[float], str]) -> None:
    """Ticks of a logarithmic scale."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))


def _section(title: str, text: str, figure: Figure | None = None) -> str:
    picture = ""
    if figure is not None:
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=125)
        source = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        picture = f'<div class="scroll"><img alt="{title}" src="{source}"></div>'
    return f'<h2>{title}</h2><p class="soft">{escaped(text)}</p>{picture}'


def _tables(run: Run) -> Iterator[str]:
    happened = [
        (
            moment(one.line.time),
            "" if one.line.version is None else f"v{one.line.version}",
            *(_LANES[one.mark][0], escaped(one.who, 100), escaped(one.text)),
        )
        for one in run.happenings[-_LISTED:]
    ]
    yield _table(("time (UTC)", "version", "what", "who", "why"), happened, len(run.happenings))
    versions = [
        (
            *(moment(row.time), f"v{row.version}", size(row.sent)),
            "" if row.dense_bytes is None else size(row.dense_bytes),
            "" if row.density is None else percent(row.density),
            "" if row.pause is None else seconds(row.pause),
            "" if row.total_s is None else seconds(row.total_s),
        )
        for row in run.rows[-_LISTED:]
    ]
    head = ("time (UTC)", "version", "bytes", "all weights", "density", "pause", "whole call")
    yield _table(head, versions, len(run.rows), "<h2>Versions</h2>")


def _table(
    head: Sequence[str], listed: Sequence[Sequence[str]], known: int, title: str = ""
) -> str:
    """These rows, the last of `known`, the newest first; the texts of cells are escaped already."""
    if not listed:
        return ""
    note = f"The last {len(listed)} of {known:,}." if len(listed) < known else ""
    titles = "".join(f"<th>{one}</th>" for one in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in reversed(listed)
    )
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f'{title}<p class="soft">{note}</p><div class="scroll">{table}</div>'


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
