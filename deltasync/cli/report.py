"""`deltasync report`: a page of the log of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from deltasync.cli.ending import printable
from deltasync.cli.terminal import make_console
from deltasync.observe.units import size


def report(
    log: Annotated[
        Path,
        typer.Argument(help="What a RunLog has written.", metavar="LOG", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write.", show_default="that of the log, as .html"),
    ] = None,
) -> None:
    """Draw the log of a run as one page of HTML.

    It shows bytes, density, pauses and failures. The page needs no network, and nothing
    beside it. An existing page is replaced; a device or pipe is written into.
    """
    from deltasync.errors import ConfigError
    from deltasync.files.output import write_output
    from deltasync.observe.report import make_page
    from deltasync.observe.run_lines import read_run

    out = log.with_suffix(".html") if out is None else out
    if os.path.realpath(out) == os.path.realpath(log):
        raise ConfigError(f"{out} is the log itself: give another --out")
    run = read_run(log)
    page = make_page(run, log.name).encode()
    write_output(out, page)
    lines = f"{len(run.lines)} lines, {len(run.skipped)} skipped"
    make_console().print(f"{printable(str(out))}: {lines}, {size(len(page))}")
