"""Numbers and untrusted names as text of a page."""

from __future__ import annotations

import html
import unicodedata
from datetime import UTC, datetime


def escaped(text: str, most: int = 500) -> str:
    """Text for HTML: nothing of it is markup, and it is `visible`."""
    return html.escape(visible(text, most))


def visible(text: str, most: int = 500) -> str:
    """Text of which what cannot be seen, or turns what follows, is a code."""
    if len(text) > most:
        text = f"{text[: most - 3]}..."
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == " " or not unicodedata.category(character).startswith(("C", "Z")):
        return character
    return f"\\u{ord(character):04x}"


def shortened(text: str, most: int) -> str:
    """A name of at most so many characters; what is left out is its middle."""
    if len(text) <= most:
        return text
    head = (most - 2) // 2
    return f"{text[:head]}..{text[len(text) - (most - 2 - head) :]}"


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


def count(number: int) -> str:
    """A number with separators."""
    return f"{number:,}"


def moment(unix_s: float) -> str:
    """A time, UTC."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "?"
