"""What `deltasync` offers: its commands and its options before a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Annotated, ParamSpec

import typer

from deltasync import __version__
from deltasync.cli.signals import interruption

_Options = ParamSpec("_Options")


def make_app(commands: Mapping[str, Iterable[str]]) -> typer.Typer:
    """The app of these commands, see `deltasync.cli.COMMANDS`."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help="Push only the changed weights from a trainer into inference engines.")(_root)
    for name, needed in commands.items():
        command = getattr(import_module(f"deltasync.cli.{name}"), name)
        app.command()(_after_imports(command, needed))
    return app


def _after_imports(
    command: Callable[_Options, None], needed: Iterable[str]
) -> Callable[_Options, None]:
    """`command`, which first imports what it needs, while there is nothing to clean up."""

    @functools.wraps(command)
    def run(*args: _Options.args, **kwargs: _Options.kwargs) -> None:
        for name in needed:
            import_module(name)
        interruption.has_begun = True
        command(*args, **kwargs)

    return run


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
