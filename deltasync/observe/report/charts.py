"""Charts as SVG: lines over versions, a heat map, and marks. Nothing in them needs a script."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltasync.observe.report.scales import Bins, Frame, LogScale, Spread, round_rows
from deltasync.observe.report.texts import escaped, shortened

Text = Callable[[float], str]

_ROW_HEIGHT = 14
_LEVELS = 255  # of colour; 0 is for nothing
_RAMP = ((228, 236, 246), (150, 190, 226), (62, 129, 191), (24, 78, 140), (9, 36, 84))
_LABEL_PX = 6.2  # width of a character of a label, about


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        name: In the legend.
        style: Class of its colour.
        values: One for each row; None where there is none.
    """

    name: str
    style: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart.

    Attributes:
        svg: The drawing.
        shown: What to show of each bin: its versions, then a text for each line.
    """

    svg: str
    shown: list[list[str]]


def lines(
    key: str, frame: Frame, bins: Bins, versions: Sequence[int], drawn: Sequence[Line], text: Text
) -> Chart:
    """Lines on a logarithmic scale; where bins have several rows, the median within its spread.

    Args:
        key: Names the chart for the script.
        frame: Its size.
        bins: Of the rows.
        versions: Of the rows.
        drawn: What to draw.
        text: Shows a value.
    """
    spreads = [bins.spreads(line.values) for line in drawn]
    scale = LogScale.of([end for each in spreads for spread in each if spread for end in spread])
    parts = [_x_axis(frame, bins, versions)]
    if scale is not None:
        parts.append(_grid(frame, scale, text))
        for line, spread in zip(drawn, spreads, strict=True):
            parts.append(_line(frame, bins, scale, line.style, spread))
    shown = [
        [_versions_of(bins, number, versions)]
        + [
            f"{line.name}: {_spread_text(spread[number], text)}"
            for line, spread in zip(drawn, spreads, strict=True)
            if spread[number] is not None
        ]
        for number in range(bins.number)
    ]
    return Chart(_svg(key, frame, bins, "".join(parts)), shown)


def heat_map(
    key: str, frame: Frame, bins: Bins, versions: Sequence[int], rows: Sequence[Line], text: Text
) -> Chart:
    """A row of colours for each line, on a logarithmic scale; a bin has the mean of its values."""
    longest = max(len(row.name) for row in rows)
    left = min(frame.left, 16 + int(_LABEL_PX * longest))
    height = frame.top + frame.bottom + _ROW_HEIGHT * len(rows)
    frame = Frame(frame.name, frame.width, height, left)
    means = [[_mean(row.values[slice(*bins.ends(n))]) for n in range(bins.number)] for row in rows]
    scale = LogScale.of([value for row in means for value in row if value])
    levels = [bytes(_level(value, scale) for value in row) for row in means]
    picture = base64.b64encode(_png(levels)).decode()
    parts = [
        f'<image class="heat" x="{frame.left}" y="{frame.top}" width="{frame.inner_width}" '
        f'height="{frame.inner_height}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{picture}"/>',
        _x_axis(frame, bins, versions),
    ]
    most = int((frame.left - 8) / _LABEL_PX)
    for number, row in enumerate(rows):
        y = frame.top + _ROW_HEIGHT * number + _ROW_HEIGHT / 2
        label = escaped(shortened(row.name, most))
        parts.append(
            f'<text class="label" x="{frame.left - 6}" y="{y:.1f}" dy=".32em" '
            f'text-anchor="end">{label}</text>'
        )
    shown = [
        [_versions_of(bins, number, versions)]
        + ["" if (mean := row[number]) is None else text(mean) for row in means]
        for number in range(bins.number)
    ]
    return Chart(_svg(key, frame, bins, "".join(parts), rows=len(rows)), shown)


def strip(
    key: str,
    frame: Frame,
    bins: Bins,
    versions: Sequence[int],
    lanes: Sequence[tuple[str, str, Sequence[int]]],
) -> Chart:
    """A lane for each kind of mark, with a line wherever a bin has some.

    Args:
        key, frame, bins, versions: As of `lines`.
        lanes: (name, class of colour, rows that are marked) of each.
    """
    height = 22
    frame = Frame(
        frame.name, frame.width, frame.top + frame.bottom + height * len(lanes), frame.left
    )
    counts = [[0] * bins.number for _ in lanes]
    parts = [_x_axis(frame, bins, versions)]
    for number, (name, style, places) in enumerate(lanes):
        for place in places:
            counts[number][bins.of_row(place)] += 1
        y, middle = frame.top + height * number + 4, frame.top + height * number + height / 2
        marked = [n for n, found in enumerate(counts[number]) if found]
        path = "".join(f"M{_x(frame, bins, n):.1f} {y}v{height - 8}" for n in marked)
        right = frame.width - frame.right
        parts.append(
            f'<text class="label" x="{frame.left - 6}" y="{middle}" dy=".32em" '
            f'text-anchor="end">{escaped(name)}</text>'
            f'<path class="grid" d="M{frame.left} {middle}H{right}"/>'
            f'<path class="mark {style}" d="{path}"/>'
        )
    shown = [
        [_versions_of(bins, n, versions)]
        + [f"{lane[0]}: {found[n]}" for lane, found in zip(lanes, counts, strict=True) if found[n]]
        for n in range(bins.number)
    ]
    return Chart(_svg(key, frame, bins, "".join(parts)), shown)


def colours(text: Text, values: Sequence[float]) -> str:
    """The legend of a heat map: its ramp, and the values at its ends."""
    scale = LogScale.of(values)
    if scale is None:
        return ""
    stops = ", ".join(f"rgb{colour}" for colour in _RAMP)
    return (
        f'<p class="legend"><span>{escaped(text(scale.low))}</span>'
        f'<span class="ramp" style="background:linear-gradient(90deg, {stops})"></span>'
        f"<span>{escaped(text(scale.high))}</span></p>"
    )


def _svg(key: str, frame: Frame, bins: Bins, inner: str, *, rows: int = 0) -> str:
    return (
        f'<svg class="{frame.name}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'data-key="{key}-{frame.name}" data-left="{frame.left}" data-top="{frame.top}" '
        f'data-step="{frame.inner_width / bins.number:.5f}" data-rows="{rows}">{inner}'
        f'<path class="cursor" d="M0 {frame.top}V{frame.height - frame.bottom}"/></svg>'
    )


def _x(frame: Frame, bins: Bins, number: int) -> float:
    return frame.left + frame.inner_width * (number + 0.5) / bins.number


def _y(frame: Frame, scale: LogScale, value: float) -> float:
    return frame.top + frame.inner_height * (1 - scale.share(value))


def _x_axis(frame: Frame, bins: Bins, versions: Sequence[int]) -> str:
    y = frame.height - frame.bottom
    parts = [f'<path class="axis" d="M{frame.left} {y}h{frame.inner_width}"/>']
    for row in round_rows(versions, max(2, frame.inner_width // 110)):
        label = f"v{versions[row]}"
        half = 1.2 * _LABEL_PX * len(label) / 2
        x = min(_x(frame, bins, bins.of_row(row)), frame.width - half)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y + 17}" text-anchor="middle">{label}</text>'
        )
    return "".join(parts)


def _grid(frame: Frame, scale: LogScale, text: Text) -> str:
    return "".join(
        f'<path class="grid" d="M{frame.left} {(y := _y(frame, scale, value)):.1f}'
        f'h{frame.inner_width}"/><text class="tick" x="{frame.left - 6}" y="{y:.1f}" dy=".32em" '
        f'text-anchor="end">{escaped(text(value))}</text>'
        for value in scale.ticks(6)
    )


def _line(
    frame: Frame, bins: Bins, scale: LogScale, style: str, spreads: Sequence[Spread | None]
) -> str:
    """The median as a line, with dots if they are few; least and largest as an area behind it.

    Bins without a value are passed over.
    """
    points = [
        (_x(frame, bins, number), *(_y(frame, scale, end) for end in spread))
        for number, spread in enumerate(spreads)
        if spread is not None
    ]
    area = ""
    if any(low != high for _, low, _, high in points):
        upper = "L".join(f"{x:.1f} {high:.1f}" for x, _, _, high in points)
        lower = "L".join(f"{x:.1f} {low:.1f}" for x, low, _, _ in reversed(points))
        area = f'<path class="area {style}" d="M{upper}L{lower}Z"/>'
    path = "L".join(f"{x:.1f} {middle:.1f}" for x, _, middle, _ in points)
    drawn = f'{area}<path class="line {style}" d="M{path}"/>'
    if bins.number > 60 and len(points) > 1:
        return drawn
    dots = "".join(f"M{x:.1f} {middle:.1f}h0" for x, _, middle, _ in points)
    return f'{drawn}<path class="dots {style}" d="{dots}"/>'


def _spread_text(spread: Spread | None, text: Text) -> str:
    assert spread is not None
    low, middle, high = spread
    return text(middle) if low == high else f"{text(middle)} ({text(low)} to {text(high)})"


def _versions_of(bins: Bins, number: int, versions: Sequence[int]) -> str:
    first, end = bins.ends(number)
    one, other = versions[first], versions[end - 1]
    return f"v{one}" if end - first == 1 else f"v{one} to v{other}"


def _mean(values: Sequence[float | None]) -> float | None:
    here = [value for value in values if value is not None]
    return sum(here) / len(here) if here else None


def _level(value: float | None, scale: LogScale | None) -> int:
    if not value or scale is None:
        return 0
    return 1 + round((_LEVELS - 1) * scale.share(value))


def _png(rows: Sequence[bytes]) -> bytes:
    """Rows of colour levels as a PNG with a palette, as https://www.w3.org/TR/png/ has it."""
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = ((b"IHDR", header), (b"PLTE", _palette()), (b"tRNS", b"\0"), (b"IDAT", data))
    made = [b"\x89PNG\r\n\x1a\n"]
    for name, content in (*chunks, (b"IEND", b"")):
        checksum = zlib.crc32(name + content)
        made.append(struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum))
    return b"".join(made)


def _palette() -> bytes:
    """Level 0, which is transparent, and the ramp."""
    colours = [bytes(3)]
    for level in range(_LEVELS):
        at = level / (_LEVELS - 1) * (len(_RAMP) - 1)
        number = min(int(at), len(_RAMP) - 2)
        pairs = zip(_RAMP[number], _RAMP[number + 1], strict=True)
        colours.append(bytes(round(a + (b - a) * (at - number)) for a, b in pairs))
    return b"".join(colours)
