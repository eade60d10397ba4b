"""Records of stores as a table for a terminal and as Markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from rich.table import Table

from benchmarks.report import describe, megabytes, row
from benchmarks.store.record import StoreRecord
from benchmarks.store.ways import Checkpoint

_COLUMNS = ("way", "publish", "fetch, commit", "together", "of the checkpoint's time", "up", "down")


def make_table(records: Sequence[StoreRecord]) -> Table:
    """For a terminal: a section for each pair and link."""
    table = Table(*_COLUMNS, title="From the trainer's step to the committed engine, seconds")
    for (pair, bits_per_s), group in groupby(records, key=_place):
        kept = list(group)
        table.add_section()
        table.add_row(
            f"{pair}: {100 * kept[0].density:.3g} %", f"{bits_per_s / 1e9:g} Gbit/s", style="bold"
        )
        for record in kept:
            table.add_row(*_cells(record, kept))
    return table


def make_markdown(records: Sequence[StoreRecord]) -> str:
    """One table for each pair, then where they were measured."""
    sections = []
    for pair, group in groupby(records, key=lambda record: record.pair):
        of_pair = list(group)
        first = of_pair[0]
        sections.append(
            f"`{pair}`: {100 * first.density:.3g} % of {first.numel / 1e6:.0f} M bf16 elements "
            f"changed, a checkpoint of {megabytes(first.dense_bytes)}. Medians, in seconds:"
        )
        lines = [row(("link", *_COLUMNS)), row(("---", "---", *("---:" for _ in _COLUMNS[1:])))]
        for (_, bits_per_s), of_link in groupby(of_pair, key=_place):
            kept = list(of_link)
            link = f"{bits_per_s / 1e9:g} Gbit/s"
            lines += [row((link, *_cells(record, kept))) for record in kept]
        sections.append("\n".join(lines))
    sections.append("\n".join(dict.fromkeys(describe(r.environment) for r in records)))
    return "\n\n".join(sections)


def _cells(record: StoreRecord, beside: Sequence[StoreRecord]) -> tuple[str, ...]:
    whole = next(one for one in beside if one.way == Checkpoint.name)
    ratio = median(w / s for w, s in zip(whole.samples, record.samples, strict=True))
    return (
        record.way,
        _seconds(median(record.publish_samples)),
        _seconds(median(record.fetch_samples)),
        _seconds(record.seconds),
        "" if record is whole else f"1/{ratio:.3g}",
        megabytes(record.up_bytes),
        megabytes(record.down_bytes),
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}"


def _place(record: StoreRecord) -> tuple[str, float]:
    return record.pair, record.bits_per_s
