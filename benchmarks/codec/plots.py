"""Image of bytes per change against the share that changed, between the bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.codec.pairs import BFLOAT16
from benchmarks.codec.record import CodecRecord
from benchmarks.plots import STYLE, save
from benchmarks.report import summary

_LINES = {  # colour, style and width by coder, from the most bytes to the least
    "int32 + value, zstd": ("#b9b9b9", "--", 1.3),
    "COO u8, u16 + value, zstd (PULSE v3.1)": ("#8a8a8a", "--", 1.3),
    "dense XOR, zstd (slime, SkyRL)": ("#e0a458", "--", 1.3),
    "u16 gap + XOR, zstd (NeMo-RL)": ("#b33951", "--", 1.3),
    "block": ("#7fb8a4", "-", 2.0),
    "gap, ulp, zstd": ("#3d7ea6", "-", 2.0),
    "class": ("#0b6e4f", "-", 2.6),
}
_RATE = 1e-6
_RESUMED = "deltasync: class, resumed training"


def draw_all(records: Sequence[CodecRecord], folder: Path) -> list[Path]:
    """Draw bytes by density. Returns the files written."""
    kept = [r for r in records if r.form == BFLOAT16]
    plain = [r for r in kept if r.kept == "masters"]
    resumed = [r for r in kept if r.kept == "resumed" and r.steps == 1]
    if not plain:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "codec-cpu-bytes.svg"
    with mpl.rc_context(STYLE):
        save(_drawn(plain, resumed), path)
    return [path]


def _drawn(records: list[CodecRecord], resumed: list[CodecRecord]) -> Figure:
    figure = Figure(figsize=(10.5, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_title("One step between syncs, by learning rate")
    _draw(left, [r for r in records if r.steps == 1], lambda r: f"{r.lr:.0e}".replace("e-0", "e-"))
    _mark(left, resumed)
    right.set_title(f"By steps between syncs, learning rate {_RATE:.0e}".replace("e-0", "e-"))
    _draw(right, [r for r in records if r.lr == _RATE], lambda r: f"k={r.steps}")
    left.set_ylabel("bytes per changed element")
    left.set_ylim(0, 5.5)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    first = records[0]
    text = f"{first.numel / 1e6:.0f} M bf16 elements, fp32 masters; {summary(first.environment)}"
    figure.suptitle(text, fontsize=8, color="#666666", x=0.01, ha="left")
    return figure


def _mark(axes: Axes, records: list[CodecRecord]) -> None:
    """Masters in the middle of a training, for which the exponent says less."""
    rows = [record for record in records if record.coder == "class"]
    densities = [100 * record.density for record in rows]
    style: dict[str, Any] = {"ls": "", "mfc": "white", "ms": 7, "zorder": 3}
    sizes = [record.bytes_each for record in rows]
    axes.plot(densities, sizes, "D", mec=_LINES["class"][0], label=_RESUMED, **style)
    known = [record.known_bound_bytes / record.changed for record in rows]
    axes.plot(densities, known, "_", mec="black", label="bound for that", **(style | {"ms": 12}))


def _draw(axes: Axes, records: list[CodecRecord], label_of: Callable[[CodecRecord], str]) -> None:
    """Lines of coders, the bounds as a band, and what each point is along the top."""
    records = sorted(records, key=lambda record: record.density)
    for coder, (colour, style, width) in _LINES.items():
        rows = [record for record in records if record.coder == coder]
        name = f"deltasync: {coder}" if rows and rows[0].is_ours else coder
        points = [100 * r.density for r in rows], [r.bytes_each for r in rows]
        axes.plot(*points, style, color=colour, lw=width, marker="o", ms=1.6 * width, label=name)
    rows = [record for record in records if record.coder == records[0].coder]
    densities = [100 * record.density for record in rows]
    unknown = [record.bound_bytes / record.changed for record in rows]
    known = [record.known_bound_bytes / record.changed for record in rows]
    axes.plot(densities, unknown, ":", color="black", lw=1.2, label="bound, weights unknown")
    axes.plot(densities, known, color="black", lw=1.2, label="bound, exponent known")
    axes.fill_between(densities, known, color="black", alpha=0.08, lw=0)
    axes.set_xscale("log")
    axes.set_xticks(densities, [f"{density:.2g}" for density in densities])
    axes.tick_params(axis="x", which="minor", length=0)
    axes.xaxis.set_minor_formatter("")
    axes.grid(visible=False, which="minor")
    axes.set_xlabel("changed elements (%)")
    for density, record in zip(densities, rows, strict=True):
        axes.annotate(label_of(record), (density, 5.3), ha="center", fontsize=8, color="#666666")
