"""`python -m benchmarks codec`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.codec.pairs import names
from benchmarks.codec.record import RECORDS, CodecRecord, append_records
from benchmarks.codec.report import make_table
from benchmarks.codec.runner import LostBits, measure
from benchmarks.record import ROOT
from benchmarks.report import describe


def codec(
    quick: Annotated[bool, typer.Option("--quick", help="10 M elements and fewer pairs.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per case, nothing else.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append the records to this file.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help=f"Replace {RECORDS.relative_to(ROOT)}.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Toy size: a smoke test.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A pair, such as masters-1e-6-k1. Repeatable.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--pairs", help="Pairs that benchmarks.codec.pairs wrote; None: make them."),
    ] = None,
) -> None:
    """Measure bytes and speed of codecs on real training steps; 15 minutes, one with --quick."""
    scale = "tiny" if tiny else "quick" if quick else "full"
    known = names(scale)
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"{sorted(unknown)} are not among {known}")
    records = _followed(measure(scale, only or (), folder))
    if record:
        RECORDS.unlink(missing_ok=True)
    for path in filter(None, (RECORDS if record else None, out)):
        records = append_records(path, records)
    try:
        _show(records, as_json=as_json)
    except LostBits as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


def _followed(records: Iterator[CodecRecord]) -> Iterator[CodecRecord]:
    """The same records, with progress on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("pre-training", total=None)
        for record in records:
            progress.update(task, description=f"after {record.pair}")
            yield record


def _show(records: Iterator[CodecRecord], *, as_json: bool) -> None:
    if as_json:
        for record in records:
            print(record.to_json(), flush=True)
        return
    done = list(records)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(make_table(done))
    if done:
        console.print(describe(done[0].environment), markup=False)
    missed = sum(not one.is_met for one in done)
    console.print(f"{missed} of {sum(one.goal is not None for one in done)} goals missed.")
