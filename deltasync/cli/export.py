"""`deltasync export`: a version as a checkpoint that restores a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltasync.cli.fetch import Out, To, write
from deltasync.cli.live import Lanes, write_live
from deltasync.cli.stores import Config, KeyFile, RunName, store_options
from deltasync.cli.terminal import AsJson, Secret


def export(
    out: Out,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]", show_default=False, help="A folder, s3://bucket/prefix, ...; of a run."
        ),
    ] = None,
    to: To = None,
    run: RunName = None,
    config: Config = None,
    key_file: KeyFile = None,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Instead of URL: a sender or relay, gloo://HOST:PORT, nixl://HOST:PORT or "
            "shared_memory:PATH.",
        ),
    ] = None,
    lane: Lanes = None,
    name: Annotated[
        str, typer.Option(help="With --connect: name of this engine.", show_default="export-NUMBER")
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, max=1e6, help="With --connect: seconds to wait for the next version."
        ),
    ] = 600.0,
    secret: Secret = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a checkpoint that a trainer can be restored from.

    It comes from a store, or with --connect from a living sender or relay. A relay answers at
    once, also if its trainer is gone; a trainer answers when it sends next. Tensors are bit for bit
    what the trainer had, in the dtypes that it sent.
    """
    _check_one_origin(url, connect, of_store=(to, run, config, key_file), of_live=(lane, secret))
    if connect is not None:
        write_live(
            connect, lane or [], out, name=name, timeout_s=timeout, secret=secret, as_json=as_json
        )
    elif url is not None:
        write(url, out, to, None, run, options=store_options(config, key_file), as_json=as_json)


def _check_one_origin(
    url: str | None,
    connect: str | None,
    *,
    of_store: tuple[str | list[str] | Path | None, ...],
    of_live: tuple[list[str] | Path | None, ...],
) -> None:
    """Raise BadParameter unless the options belong to one origin, and there is one."""
    if (url is None) == (connect is None):
        raise typer.BadParameter("give a store's URL, or --connect ADDRESS", param_hint="URL")
    if any(of_store if connect is not None else of_live):
        other = "a store's URL" if connect is not None else "--connect"
        raise typer.BadParameter(f"options that belong to {other} were given too")
