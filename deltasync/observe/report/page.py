"""The page of a run: self-contained, without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median, quantiles

from deltasync.observe.report import charts
from deltasync.observe.report.charts import Chart, Line
from deltasync.observe.report.scales import Bins, Frame
from deltasync.observe.report.series import Happening, Mark, Series, series_of
from deltasync.observe.report.texts import count, escaped, moment, percent, seconds, size, visible
from deltasync.observe.run_lines import Run

_WIDE, _NARROW = Frame("wide", 1000, 260, 70), Frame("narrow", 366, 220, 58)
_WIDE_MAP, _NARROW_MAP = Frame("wide", 1000, 0, 190), Frame("narrow", 366, 0, 104)
_BINS = {"wide": 450, "narrow": 140}
_LISTED = 200  # happenings
_LAYERS = 120  # rows of the heat map
_LANES: tuple[tuple[Mark, str], ...] = (
    ("failed", "failed"),
    ("recovered", "recovered"),
    ("lost", "lost"),
    ("full", "full sync"),
    ("joined", "joined"),
    ("warning", "warning"),
)
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


@dataclass(frozen=True, slots=True)
class _Section:
    """A heading, a sentence, and the two drawings of a chart with its legend."""

    key: str
    title: str
    text: str
    drawn: tuple[Chart, ...] = ()
    legend: str = ""


def make_page(run: Run, title: str) -> str:
    """The whole HTML page of a log; `title` is escaped, as everything of the log."""
    series = series_of(run)
    sections = [section for section in _sections(series) if section is not None]
    shown: dict[str, object] = {
        f"{section.key}-{name}": chart.shown
        for section in sections
        for name, chart in zip(("wide", "narrow"), section.drawn, strict=False)
    }
    shown["names"] = [visible(name) for name in _names(series)]
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    style, script = _resource("page.css"), _resource("page.js")
    body = "".join(
        (
            _head(series, title),
            _tiles(series),
            _notes(run, series),
            *map(_section_html, sections),
            _happenings(series),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        f'<link rel="icon" href="data:,"><title>{escaped(title)}</title><style>{style}</style>'
        f'</head><body>{body}<div id="tip"></div>'
        f'<script type="application/json" id="shown">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return files("deltasync.observe.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Nothing is loaded, and only the page's own script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"script-src 'sha256-{digest}'"
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {scripts}"


def _sections(series: Series) -> Iterator[_Section | None]:
    rows = series.rows
    if not rows:
        return
    dense = [row.dense for row in rows]
    sent = Line("sent", "sent", [row.sent for row in rows])
    yield _lines(
        series,
        "bytes",
        "Bytes of each version",
        "Payload that each receiver gets, on a logarithmic scale."
        if series.source != "publish"
        else "Bytes written to the store for each version, on a logarithmic scale.",
        [sent, Line("all weights", "dense", dense)] if any(dense) else [sent],
        size,
    )
    yield _lines(
        series,
        "density",
        "Density",
        "Share of the elements that a delta changes, on a logarithmic scale.",
        [Line("density", "sent", [row.density for row in rows])],
        percent,
    )
    yield _heat_map(series)
    pauses = Line("pause", "sent", [row.pause_s for row in rows])
    yield _lines(
        series,
        "pauses",
        "Pauses",
        _PAUSES[series.source],
        [pauses, Line("whole call", "other", [row.total_s for row in rows])],
        seconds,
    )
    yield _strip(series)


def _lines(
    series: Series,
    key: str,
    title: str,
    text: str,
    drawn: Sequence[Line],
    shown: Callable[[float], str],
) -> _Section | None:
    drawn = [line for line in drawn if any(line.values)]
    if not drawn:
        return None
    versions = [row.version for row in series.rows]
    made = tuple(
        charts.lines(key, frame, _bins(series, frame), versions, drawn, shown)
        for frame in (_WIDE, _NARROW)
    )
    names = "".join(
        f'<span><i class="{line.style}"></i>{escaped(line.name)}</span>' for line in drawn
    )
    legend = f'<p class="legend">{names}</p>' if len(drawn) > 1 else ""
    return _Section(key, title, text, made, legend)


def _heat_map(series: Series) -> _Section | None:
    title = "Density by layer"
    names = _names(series)
    if not names:
        if not any(row.density is not None for row in series.rows):
            return None
        text = 'Not in this log: SenderOptions(report_density="layer") adds it.'
        return _Section("layers", title, escaped(text))
    drawn = [Line(name, "", [row.density_by.get(name) for row in series.rows]) for name in names]
    known = len({name for row in series.rows for name in row.density_by})
    text = "Share of the elements that changed, by version and layer; empty where nothing did."
    if known > len(names):
        text += f" Of {known}, the {len(names)} that change most."
    versions = [row.version for row in series.rows]
    made = tuple(
        charts.heat_map("layers", frame, _bins(series, frame), versions, drawn, percent)
        for frame in (_WIDE_MAP, _NARROW_MAP)
    )
    values = [value for line in drawn for value in line.values if value]
    return _Section("layers", title, text, made, charts.colours(percent, values))


def _names(series: Series) -> list[str]:
    """The layers that the heat map has, in the order of the model."""
    sums: dict[str, float] = {}
    for row in series.rows:
        for name, density in row.density_by.items():
            sums[name] = sums.get(name, 0.0) + density
    most = set(sorted(sums, key=lambda name: -sums[name])[:_LAYERS])
    return [name for name in sums if name in most]


def _strip(series: Series) -> _Section:
    title = "Failures and recoveries"
    lanes = [
        (name, mark, [each.place for each in series.happenings if each.mark == mark])
        for mark, name in _LANES
        if series.count(mark)
    ]
    if not lanes:
        return _Section("marks", title, "Nothing failed, and no receiver was lost.")
    versions = [row.version for row in series.rows]
    made = tuple(
        charts.strip("marks", frame, _bins(series, frame), versions, lanes)
        for frame in (Frame("wide", 1000, 0, 90), Frame("narrow", 366, 0, 76))
    )
    return _Section("marks", title, "Where they were; the table below says what they were.", made)


def _bins(series: Series, frame: Frame) -> Bins:
    return Bins.of(len(series.rows), _BINS[frame.name])


def _section_html(section: _Section) -> str:
    drawings = "".join(chart.svg for chart in section.drawn)
    figure = f"<figure>{drawings}{section.legend}</figure>" if drawings else ""
    return (
        f'<section id="{section.key}"><h2>{section.title}</h2>'
        f'<p class="soft">{section.text}</p>{figure}</section>'
    )


def _head(series: Series, title: str) -> str:
    parts = [_SOURCES[series.source]]
    if series.rows:
        first, last = series.rows[0], series.rows[-1]
        parts.append(f"{moment(first.time)} to {moment(last.time)} UTC")
    if series.releases:
        parts.append(f"deltasync {', '.join(series.releases)}")
    return f'<h1>{escaped(title)}</h1><p class="soft">{escaped("; ".join(parts))}</p>'


def _tiles(series: Series) -> str:
    return f'<dl class="tiles">{"".join(_tile(*tile) for tile in _facts(series))}</dl>'


def _tile(name: str, value: str, more: str = "", *, is_bad: bool = False) -> str:
    small = f"<small>{escaped(more)}</small>" if more else ""
    bad = ' class="bad"' if is_bad else ""
    return f"<div><dt>{escaped(name)}</dt><dd{bad}>{escaped(value)}{small}</dd></div>"


def _facts(series: Series) -> Iterator[tuple[str, str, str]]:
    rows = series.rows
    deltas = [row for row in rows if row.density is not None]
    span = f"v{rows[0].version} to v{rows[-1].version}" if rows else ""
    yield "Versions", count(len(rows)), span
    sent = sum(row.sent for row in rows)
    dense = sum(row.dense or 0 for row in rows)
    more = f"{dense / sent:.3g}x less than all weights" if dense > 1.05 * sent > 0 else ""
    yield (
        "Bytes to each receiver" if series.source != "publish" else "Bytes written",
        size(sent),
        more,
    )
    if deltas:
        densities = [row.density for row in deltas if row.density is not None]
        low, high = percent(min(densities)), percent(max(densities))
        yield "Density, median", percent(median(densities)), f"{low} to {high}"
    pauses = [row.pause_s for row in rows if row.pause_s is not None]
    if pauses:
        yield "Pause, median", seconds(median(pauses)), f"99 %: {seconds(_high(pauses))}"
    calls = [row.total_s for row in rows if row.total_s is not None]
    if calls:
        yield "Whole call, median", seconds(median(calls)), f"99 %: {seconds(_high(calls))}"
    yield "Failed syncs", count(series.num_failures), _most(series)
    lost = series.count("lost")
    yield "Receivers lost", count(lost), ""
    yield "Full syncs", count(series.count("full")), "of receivers that joined"


def _high(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98] if len(values) > 1 else values[0]


def _most(series: Series) -> str:
    return ", ".join(f"{name} {number}" for name, number in series.by_error.most_common(2))


def _notes(run: Run, series: Series) -> str:
    notes = []
    if run.skipped:
        first, why = run.skipped[0]
        lines = "1 line was" if len(run.skipped) == 1 else f"{len(run.skipped)} lines were"
        notes.append(f"{lines} skipped, the first is line {first}: {why}")
    if not series.rows:
        notes.append("No sync of this log has succeeded.")
    return "".join(f'<p class="note">{escaped(note)}</p>' for note in notes)


def _happenings(series: Series) -> str:
    found = series.happenings
    if not found:
        return ""
    listed = found[-_LISTED:]
    note = ""
    if len(listed) < len(found):
        note = f'<p class="soft">The last {len(listed)} of {count(len(found))}.</p>'
    head = "".join(f"<th>{name}</th>" for name in ("time (UTC)", "version", "what", "who", "why"))
    body = "".join(map(_happening, reversed(listed)))
    return f"{note}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _happening(each: Happening) -> str:
    version = "" if each.version is None else f"v{each.version}"
    name = dict(_LANES)[each.mark]
    return (
        f"<tr><td>{moment(each.time)}</td><td>{version}</td>"
        f'<td class="{each.mark}">{name}</td><td>{escaped(each.who, 100)}</td>'
        f"<td>{escaped(each.text)}</td></tr>"
    )
