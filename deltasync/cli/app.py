"""What `deltasync` offers: its commands and its options before a command."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from deltasync import __version__


def make_app(commands: Iterable[str]) -> typer.Typer:
    """The app of these commands, see `deltasync.cli.COMMANDS`."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help="Push only the changed weights from a trainer into inference engines.")(_root)
    for name in commands:
        app.command()(getattr(import_module(f"deltasync.cli.{name}"), name))
    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"deltasync {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Nothing else comes before the command."""
