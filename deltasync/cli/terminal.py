"""Output that commands share: consoles, progress, numbers, bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

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

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, nothing else.")
]
FilePath: TypeAlias = Annotated[Path, typer.Argument(show_default=False)]


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


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line."""
    print(json.dumps(value))


def print_written(
    out: Path, num_bytes: int, num_tensors: int, digest: int, *, what: str = "", more: str = ""
) -> None:
    """Print which checkpoint was written."""
    from deltasync.delta.digests import digest_text

    made = f"{what}{size(num_bytes)} in {count(num_tensors)} tensors"
    line = f"{out}: {made}, state digest {digest_text(digest)}{more}"
    make_console().print(line, soft_wrap=True)


def make_table(*columns: str, names: int = 1) -> Table:
    """A table whose first columns are names, and whose others are numbers; bars have no title."""
    table = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        is_name = number < names
        table.add_column(
            column,
            justify="left" if is_name or not column else "right",
            style=None if column else "cyan",
            overflow="fold" if is_name else "ellipsis",
            no_wrap=not is_name,
        )
    return table


def cut(table: Table, rest: int, what: str = "more") -> Table:
    """Note below a table how many rows are not shown, if any."""
    if rest > 0:
        table.caption, table.caption_justify = f"and {count(rest)} {what}", "left"
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


def count(number: int) -> str:
    """Such as "536,870,912"."""
    return f"{number:,}"


def bar(console: Console, share: float, width: int = 16) -> str:
    """A share of 0 to 1 as a bar; a share above 0 is visible."""
    full = round(share * width) or int(share > 0)
    return ("#" if console.options.ascii_only else "\u2588") * full
