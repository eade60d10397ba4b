"""Output that commands share: consoles, progress, numbers, bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

import typer
from rich import progress as bars
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltasync.cli.signals import tell

if TYPE_CHECKING:
    from deltasync.files.checkpoint import Selection
    from deltasync.files.comparing import Advance


class SizedPhase(Protocol):
    """What `phases` yields."""

    def __call__(self, description: str, total: int = ..., /) -> Advance:
        """Begin a phase. Returns what to call with its progress."""
        ...


_PIPED_WIDTH = 120

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, nothing else.")
]
Only: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Only tensors whose names match, such as '*.mlp.*'; repeatable.",
    ),
]
Rename: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="OLD=NEW",
        help="Replace the prefix OLD of names by NEW, in both; repeatable.",
    ),
]
IgnoreMissing: TypeAlias = Annotated[
    bool, typer.Option("--ignore-missing", help="Skip tensors that only one of them has.")
]
Secret: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="A file with the secret that both ends of a network link share."),
]
FilePath: TypeAlias = Annotated[Path, typer.Argument(show_default=False)]


def selection(only: list[str] | None, rename: list[str] | None, ignore: bool) -> Selection:
    """Parse the options with these names. Raises BadParameter."""
    from deltasync.files.checkpoint import Selection

    pairs = [text.partition("=") for text in rename or ()]
    for old, sign, _ in pairs:
        if not sign:
            raise typer.BadParameter(f"{old!r} is not like OLD=NEW", param_hint="--rename")
    renames = tuple((old, new) for old, _, new in pairs)
    return Selection(rename=renames, only=tuple(only or ()), ignore_missing=ignore)


def tell_left_out(names: list[str]) -> None:
    """Report on stderr what only one of two checkpoints has."""
    if names:
        from deltasync.sync.target.base import some_of

        line = f"left out, as only one has them: {some_of(names)}"
        tell(printable(line))


def printable(text: str) -> str:
    """One line, with control and invisible characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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


def print_json(found: dict[str, Any]) -> None:
    """Print one object on one line."""
    print(json.dumps(found))


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
def phases(num_bytes: int = 0, *, counts: bool = False) -> Iterator[SizedPhase]:
    """Show progress over `num_bytes` in each phase, on stderr, if that is a terminal.

    A phase may have a number of its own. With `counts` it is not of bytes.
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


def size(num_bytes: int) -> str:
    """Such as "1.07 GB"."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def percent(share: float) -> str:
    """Such as "0.1 %"."""
    return f"{100 * share:.3g} %"


def bar(console: Console, share: float, width: int = 16) -> str:
    """A share of 0 to 1 as a bar; a share above 0 is visible."""
    full = round(share * width) or int(share > 0)
    return ("#" if console.options.ascii_only else "\u2588") * full
