"""`python -m benchmarks`: cpu (the default), table, plot."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.cases import GROUPS
from benchmarks.record import RESULTS, ROOT, Result, append_records, read_records
from benchmarks.report import describe, make_markdown, make_table
from benchmarks.runner import GroupFailed, run_group

RECORDS = RESULTS / "cpu.jsonl"
IMAGES = ROOT / "docs" / "images"

app = typer.Typer(add_completion=False, invoke_without_command=True)
Records = Annotated[Path, typer.Option("--records", help="Where the records are.")]


@app.callback()
def default(context: typer.Context) -> None:
    """Benchmarks of deltasync."""
    if context.invoked_subcommand is None:
        cpu()


@app.command()
def cpu(
    quick: Annotated[bool, typer.Option("--quick", help="4 Mi elements, under a minute.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a case, nothing else.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append the records to this file.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help=f"Replace {RECORDS.relative_to(ROOT)}.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Some of: {', '.join(GROUPS)}. Repeatable.")
    ] = None,
) -> None:
    """Measure on the CPU, one thread a process; under eight minutes."""
    groups = only or list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        raise typer.BadParameter(f"{sorted(unknown)} are not among {list(GROUPS)}")
    results = _measure(groups, "quick" if quick else "full")
    if record:
        RECORDS.unlink(missing_ok=True)
    for path in (RECORDS if record else None, out):
        results = results if path is None else append_records(path, results)
    try:
        _show(results, as_json=as_json)
    except GroupFailed as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def table(records: Records = RECORDS) -> None:
    """Print the records as a Markdown table."""
    print(make_markdown(read_records(records)))


@app.command()
def plot(records: Records = RECORDS, folder: Path = IMAGES) -> None:
    """Draw the records into docs/images."""
    from benchmarks.plots import draw_all

    for path in draw_all(read_records(records), folder):
        print(path)


def _measure(groups: list[str], scale: str) -> Iterator[Result]:
    """Records as they come, with progress on stderr."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(groups))
        for group in groups:
            progress.update(task, description=group)
            for result in run_group(group, scale):
                changed = f"{100 * result.density:.3g} % changed"
                progress.update(task, description=f"{group}: {changed}")
                yield result
            progress.advance(task)


def _show(results: Iterator[Result], *, as_json: bool) -> None:
    if as_json:
        for result in results:
            print(result.to_json(), flush=True)
        return
    done = list(results)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(make_table(done))
    console.print(describe(done[0].environment))
    missed = sum(not result.met for result in done)
    console.print(f"{missed} of {sum(r.goal is not None for r in done)} goals missed.")


if __name__ == "__main__":
    app()
