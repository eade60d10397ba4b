"""Output that commands share: consoles, tables, progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import progress as bars
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltasync.cli.ending import printable
from deltasync.observe.units import size

if TYPE_CHECKING:
    from deltasync.files.comparing import Advance


_PIPED_WIDTH = 120


def file_argument(name: str) -> Any:
    """Annotates a path that is called by this name in help and errors."""
    return typer.Argument(metavar=name, show_default=False)


class _Console(Console):
    """Shows strings as they are: tensors and files may have any names."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def make_console() -> Console:
    """The console for results, on stdout. Piped output has a fixed width and no colours."""
    is_piped = not sys.stdout.isatty()
    return _Console(
        highlight=False,
        markup=False,
        emoji=False,
        width=_PIPED_WIDTH if is_piped else None,
        color_system=None if is_piped else "auto",
        force_terminal=False if is_piped else None,
    )


def print_written(
    out: Path, num_bytes: int, num_tensors: int, digest: int, *, what: str = "", more: str = ""
) -> None:
    """Print which checkpoint was written."""
    from deltasync.delta.ledger import digest_text

    made = f"{what}{size(num_bytes)} in {num_tensors:,} tensors"
    line = f"{out}: {made}, state digest {digest_text(digest)}{more}"
    make_console().print(line, soft_wrap=True)


def make_table(*columns: str, names: int = 1) -> Table:
    """A table whose first columns are names, and whose others are numbers."""
    table = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        if number < names:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


@contextmanager
def phases(num_bytes: int = 0, *, counts: bool = False) -> Iterator[Callable[..., Advance]]:
    """Show progress on stderr, if that is a terminal.

    Yields a function (description, total) that begins a phase, and returns what to call with its
    progress. The total is `num_bytes` by default; with `counts` it is not of bytes.
    """
    console = Console(stderr=True)
    sizes = () if counts else (bars.DownloadColumn(), bars.TransferSpeedColumn())
    ends = bars.TextColumn("{task.description:10}"), bars.BarColumn(), bars.TimeRemainingColumn()
    with bars.Progress(
        *ends, *sizes, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def phase(description: str, total: int = num_bytes) -> Advance:
            for task in progress.task_ids:
                progress.remove_task(task)
            task = progress.add_task(description, total=total)
            return lambda done: progress.advance(task, done)

        yield phase
