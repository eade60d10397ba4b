"""Records of codecs as a table for a terminal and as Markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median

from rich.table import Table

from benchmarks.codec.pairs import BFLOAT16, rate
from benchmarks.codec.record import CHANGES_GOAL, DENSE_GOAL, CodecRecord
from benchmarks.report import bold, describe, row

BASELINE = "int32 + value, zstd"  # of the ratios of speeds
_RESUMED = (
    " Resumed ones lie anywhere between two bf16 numbers, as in the middle of a training: there "
    "the old exponent says less."
)
_SWEPT = 1e-6  # the learning rate at which steps between syncs vary
_COLUMNS = ("codec", "bytes", "goal", "of bound", "encode", "", "decode", "")


def make_table(records: Sequence[CodecRecord]) -> Table:
    """For a terminal: a section for each pair."""
    table = Table(*_COLUMNS, title="Bytes per changed element; million changes a second")
    for pair, group in groupby(records, key=lambda record: record.pair):
        kept = list(group)
        first = kept[0]
        table.add_section()
        table.add_row(
            f"{pair}: {100 * first.density:.3g} %", f"[{first.numel / 1e6:.0f} M]", style="bold"
        )
        baseline = _baseline(kept)
        for record in kept:
            table.add_row(*_cells(record, baseline), style=None if record.is_met else "red")
        table.add_row("bound, weights unknown", f"{first.bound_bytes / first.changed:.3f}")
        table.add_row("bound, exponent known", f"{first.known_bound_bytes / first.changed:.3f}")
    return table


def make_markdown(records: Sequence[CodecRecord]) -> str:
    """Bytes by learning rate, by steps between syncs and by form; then speeds."""
    plain = [r for r in records if r.form == BFLOAT16]
    rates = [r for r in plain if r.steps == 1]
    swept = [r for r in plain if r.lr == _SWEPT and r.kept == "masters"]
    swept = swept if len({r.steps for r in swept}) > 1 else []
    served = [r for r in records if r.form != BFLOAT16]
    resumed = [r for r in rates if r.lr == _SWEPT and r.kept == "resumed"]
    sizes = sorted({record.numel for record in plain})
    sections = [
        "Bytes per changed element, all headers and tables counted; a bold figure misses its "
        f"goal. The model has {sizes[-1] / 1e6:.0f} M elements.",
        "By learning rate, one step between syncs. fp32 masters begin at a bf16 checkpoint, ten "
        "steps before." + (_RESUMED if resumed else ""),
        _bytes(rates, [f"{_kept(r)}{rate(r.lr)}" for r in _firsts(rates)]),
        f"By optimizer steps between syncs, masters, learning rate {rate(_SWEPT)}:"
        if swept
        else "",
        _bytes(swept, [str(r.steps) for r in _firsts(swept)]),
        "What engines serve of the matrices of the model's blocks:",
        _bytes(served, [f"{r.form}, {rate(r.lr)}, {r.steps} steps" for r in _firsts(served)]),
        f"Speeds on one thread at {rate(_SWEPT)}, one step: millions of changes, and bytes of "
        f'dense weights, in a second; in brackets relative to "{BASELINE}". They begin with the '
        "changes found and end with positions and new values checked.",
        _speeds([r for r in rates if r.lr == _SWEPT and r.kept == "masters"]),
        "The same of a resumed training:" if resumed else "",
        _speeds(resumed),
        "\n".join(
            dict.fromkeys(describe(r.environment)[:-1] + f"; zstd {r.zstd}." for r in records)
        ),
    ]
    return "\n\n".join(section for section in sections if section)


def _bytes(records: list[CodecRecord], titles: list[str]) -> str:
    """One row a coder, one column a pair."""
    firsts = _firsts(records)
    found = {(record.coder, record.pair): record for record in records}
    lines = [
        row(("", *titles)),
        row(("---", *("---:" for _ in firsts))),
        row(("changed", *(f"{100 * r.density:.3g} %" for r in firsts))),
    ]
    for coder in dict.fromkeys(record.coder for record in records):
        cells = (found.get((coder, r.pair)) for r in firsts)
        texts = (bold(f"{r.bytes_each:.3f}", unless=r.is_met) if r else "" for r in cells)
        lines.append(row((_titled(found[coder, firsts[0].pair]), *texts)))
    unknown = (f"{r.bound_bytes / r.changed:.3f}" for r in firsts)
    known = (f"{r.known_bound_bytes / r.changed:.3f}" for r in firsts)
    lines += [row(("bound, weights unknown", *unknown)), row(("bound, exponent known", *known))]
    return "\n".join(lines) if records else ""


def _speeds(records: list[CodecRecord]) -> str:
    if not records:
        return ""
    baseline = _baseline(records)
    titles = ("", "encode, M changes/s", "encode, MB/s", "decode, M changes/s", "decode, MB/s")
    lines = [row((*titles, "goal")), row(("---", *("---:" for _ in titles[1:]), "---"))]
    for record in records:
        cells = [_titled(record)]
        most = record.slowest_allowed_s()
        for ways in ("encode_samples", "decode_samples"):
            seconds = median(getattr(record, ways))
            is_met = most is None or seconds <= most
            ratio = _ratio(getattr(baseline, ways), getattr(record, ways))
            cells.append(
                bold(f"{record.changed / seconds / 1e6:.3g} ({ratio:.2f}x)", unless=is_met)
            )
            cells.append(bold(f"{record.dense_bytes / seconds / 1e6:,.0f}", unless=is_met))
        lines.append(row((*cells, _speed_goal(record))))
    return "\n".join(lines)


def _speed_goal(record: CodecRecord) -> str:
    if record.slowest_allowed_s() is None:
        return ""
    if record.coder in CHANGES_GOAL:
        return f">= {CHANGES_GOAL[record.coder] / 1e6:.0f} M changes/s"
    return f">= {DENSE_GOAL[record.coder] / 1e6:.0f} MB/s"


def _cells(record: CodecRecord, baseline: CodecRecord) -> tuple[str, ...]:
    return (
        _titled(record).replace("**", ""),
        f"{record.bytes_each:.3f}",
        "" if record.goal is None else f"<= {record.goal:g}",
        f"{record.bytes / record.known_bound_bytes:.2f}x",
        f"{record.changed / record.encode_s / 1e6:.3g}",
        f"{_ratio(baseline.encode_samples, record.encode_samples):.2f}x",
        f"{record.changed / record.decode_s / 1e6:.3g}",
        f"{_ratio(baseline.decode_samples, record.decode_samples):.2f}x",
    )


def _titled(record: CodecRecord) -> str:
    return f"deltasync: {record.coder}" if record.is_ours else record.coder


def _ratio(baseline: Sequence[float], samples: Sequence[float]) -> float:
    """How many times as fast, by rounds."""
    return median(b / s for b, s in zip(baseline, samples, strict=True))


def _baseline(records: Iterable[CodecRecord]) -> CodecRecord:
    return next(record for record in records if record.coder == BASELINE)


def _firsts(records: Iterable[CodecRecord]) -> list[CodecRecord]:
    """One record of each pair."""
    return list({record.pair: record for record in reversed(list(records))}.values())[::-1]


def _kept(record: CodecRecord) -> str:
    return {"masters": "", "resumed": "resumed, ", "bf16": "pure bf16, "}[record.kept]
