"""`python -m benchmarks store`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.record import ROOT
from benchmarks.report import describe
from benchmarks.store.record import RECORDS, StoreRecord, append_records
from benchmarks.store.report import make_table
from benchmarks.store.runner import WrongWeights, measure


def store(
    quick: Annotated[bool, typer.Option("--quick", help="10 M elements, one pair.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per case, nothing else.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append the records to this file.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help=f"Replace {RECORDS.relative_to(ROOT)}.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Toy size: a smoke test.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--pairs", help="Pairs that benchmarks.codec.pairs wrote; None: make them."),
    ] = None,
) -> None:
    """Measure versions over links of 0.1, 1 and 10 Gbit/s to an S3 server; needs moto[server]."""
    records = _followed(measure("tiny" if tiny else "quick" if quick else "full", folder))
    if record:
        RECORDS.unlink(missing_ok=True)
    for path in filter(None, (RECORDS if record else None, out)):
        records = append_records(path, records)
    try:
        _show(records, as_json=as_json)
    except WrongWeights as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


def _followed(records: Iterator[StoreRecord]) -> Iterator[StoreRecord]:
    """The same records, with progress on stderr."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=None)
        for record in records:
            after = f"after {record.pair}, {record.bits_per_s / 1e9:g} Gbit/s"
            progress.update(task, description=after)
            yield record


def _show(records: Iterator[StoreRecord], *, as_json: bool) -> None:
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
