"""What `deltasync` offers: its commands and its options before a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperCommand

from deltasync import __version__
from deltasync.cli.signals import interruption

_Options = ParamSpec("_Options")


class _Command(TyperCommand):
    """A command whose arguments are called in capitals, as its help and errors call them."""

    def __init__(self, *words: Any, params: list[Any], **options: Any) -> None:
        for one in params:
            if one.param_type_name == "argument" and one.metavar is None and one.name:
                one.metavar = one.name.upper()
        super().__init__(*words, params=params, **options)


def make_app(commands: Mapping[str, Iterable[str]]) -> typer.Typer:
    """The app of these commands, see `deltasync.cli.COMMANDS`."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help="Push only the changed weights from a trainer into inference engines.")(_root)
    for name, needed in commands.items():
        command = getattr(import_module(f"deltasync.cli.{name}"), name)
        app.command(cls=_Command)(_after_imports(command, needed))
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
