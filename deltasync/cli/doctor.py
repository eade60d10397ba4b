"""`deltasync doctor`: what this machine can do, and what to do about what it cannot."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltasync.cli.ending import FAILED, printable

if TYPE_CHECKING:
    from deltasync.cli.probes.checks import Check

_WORDS = {True: "yes", False: "no", None: "-"}
_STYLES = {True: "green", False: "red", None: "dim"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try what works here: links, GPUs, kernels, engines.

    Links are tried between two new processes. The exit code is 1 if something that deltasync cannot
    do without is broken.
    """
    from deltasync.cli.probes.checks import all_checks, works

    with Console(stderr=True).status("trying every link between two processes ..."):
        checks = list(all_checks())
    if as_json:
        rows = [asdict(check) for check in checks]
        print(json.dumps({"works": works(checks), "checks": rows}))
    else:
        _show(Console(highlight=False), checks, is_well=works(checks))
    if not works(checks):
        raise typer.Exit(FAILED)


def _show(console: Console, checks: list[Check], *, is_well: bool) -> None:
    """A table of the checks, each advice below its row, and the verdict."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(overflow="fold")
    for check in checks:
        style = _STYLES[check.ok]
        found = Text(printable(check.found), style="dim" if check.ok is None else "")
        if check.ok is False:
            found.append(f"\n{check.advice}", style="yellow")
        table.add_row(check.name, Text(_WORDS[check.ok], style=style), found)
    console.print(table)
    verdict = "deltasync works here." if is_well else "deltasync does not work here: see above."
    console.print(Text(verdict, style="bold green" if is_well else "bold red"))
