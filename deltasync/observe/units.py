"""Numbers as people read them, with three digits."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Such as "1.07 GB"."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:.0f} {units[0]}"


def percent(share: float) -> str:
    """A share of 1, such as "0.1 %"."""
    return f"{100 * share:.3g} %"


def seconds(value: float) -> str:
    """A duration, such as "1.26 ms" or "2.5 h"."""
    if value >= 120:
        return f"{value / 3600:.3g} h" if value >= 7200 else f"{value / 60:.3g} min"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
