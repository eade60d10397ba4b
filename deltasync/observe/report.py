"""Draws the log of a run as one HTML page, which loads nothing and runs no script.

Names and messages in a log are untrusted: `escaped` lets only text through.
"""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib.resources import files
from statistics import median, quantiles
from string import Template

import numpy as np

from deltasync.errors import ConfigError
from deltasync.observe.run_lines import Run
from deltasync.observe.units import percent, seconds, size

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ModuleNotFoundError:
    raise ConfigError("reports are drawn by matplotlib: pip install matplotlib") from None

_LISTED = 200  # rows of a table
_LEAST = 1e-15  # smaller values count as 0, which a logarithmic scale does not show
_SOURCES = {
    "sync": "Syncs of a sender",
    "publish": "Versions published to a store",
    "receive": "Syncs of receivers",
}
_Values = list[float | None]


def make_page(run: Run, title: str) -> str:
    """Return the whole HTML page of a log.

    Args:
        run: The log.
        title: Heading of the page, such as the name of the log. It is escaped.
    """
    body = "\n".join((_head(run, title), *_notes(run), *_charts(run), _happenings(run)))
    template = files("deltasync.observe").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escaped(title), body=body)


def _head(run: Run, title: str) -> str:
    parts = [_SOURCES[run.source]]
    if run.rows:
        parts.append(f"{moment(run.rows[0].time)} to {moment(run.rows[-1].time)} UTC")
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
    yield "Full syncs", f"{run.count('full sync'):,}", "of receivers that joined"


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
    yield _lines(
        run,
        "Pauses",
        "Of engines; of a sender, from the decision until every receiver has committed.",
        {"pause": [row.pause for row in rows], "whole call": [row.total_s for row in rows]},
        seconds,
    )


def _lines(
    run: Run, title: str, text: str, lines: dict[str, _Values], shown: Callable[[float], str]
) -> str:
    """A chart of lines on a logarithmic scale; empty if there is nothing to draw."""
    drawn = {name: _positive(values) for name, values in lines.items()}
    drawn = {name: values for name, values in drawn.items() if np.isfinite(values).any()}
    if not drawn:
        return ""
    figure = Figure(figsize=(10, 2.5), layout="constrained")
    axes = figure.subplots()
    labels = {place: f"v{row.version}" for place, row in enumerate(run.rows)}
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: labels.get(int(place), "")))
    for name, values in drawn.items():
        axes.plot(values, ".-", label=name)
    low, high = (end(np.concatenate(list(drawn.values()))) for end in (np.nanmin, np.nanmax))
    margin = 1.15 if high / low > 3 else 2.0
    axes.set_yscale("log")
    axes.set_ylim(low / margin, high * margin)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.grid(axis="y", color="#e2e5ea")
    if len(drawn) > 1:
        figure.legend(loc="outside lower left", ncols=len(drawn), frameon=False)
    return _section(title, text, figure)


def _positive(values: Iterable[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """float64 of these values; NaN for those that a logarithmic scale does not show."""
    found = np.array([np.nan if value is None else value for value in values], np.float64)
    found[~(found > _LEAST)] = np.nan
    return found


def _section(title: str, text: str, figure: Figure | None = None) -> str:
    picture = ""
    if figure is not None:
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=125)
        source = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
        picture = f'<div class="scroll"><img alt="{title}" src="{source}"></div>'
    return f'<h2>{title}</h2><p class="soft">{escaped(text)}</p>{picture}'


def _happenings(run: Run) -> str:
    """A table of what happened, the newest first."""
    title, count = "Failures, losses and joins", len(run.happenings)
    if not count:
        return _section(title, "Nothing failed, and no receiver was lost.")
    listed = [
        (
            moment(one.line.time),
            "" if one.line.version is None else f"v{one.line.version}",
            one.mark,
            escaped(one.who, 100),
            escaped(one.text),
        )
        for one in reversed(run.happenings[-_LISTED:])
    ]
    heads = "".join(f"<th>{one}</th>" for one in ("time (UTC)", "version", "what", "who", "why"))
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in listed)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    text = f"The last {len(listed)} of {count:,}." if len(listed) < count else ""
    return f'{_section(title, text)}<div class="scroll">{table}</div>'


def escaped(text: str, most: int = 500) -> str:
    """Text for HTML: nothing of it is markup, and what cannot be seen is a code."""
    if len(text) > most:
        text = f"{text[: most - 3]}..."
    return html.escape("".join(map(_visible, text)))


def _visible(character: str) -> str:
    if character == " " or not unicodedata.category(character).startswith(("C", "Z")):
        return character
    return f"\\u{ord(character):04x}"


def moment(unix_s: float) -> str:
    """A time, UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
