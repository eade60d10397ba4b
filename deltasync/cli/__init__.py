"""The command line: `deltasync COMMAND`, one file a command."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

COMMANDS = ("apply", "bench", "demo", "diff", "doctor", "inspect", "verify")
"""Each a function of this name in a module of this name."""

USAGE_ERROR, SIGNALLED = 2, 128

_ENDINGS = (signal.SIGHUP, signal.SIGTERM)


def main() -> None:
    """Run the command that `sys.argv` asks for, and exit with its code."""
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)
    sys.exit(_run())


def _terminate(number: int, _: object) -> None:
    """What was begun is cleared away, undisturbed by another signal: `timeout` sends two."""
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(SIGNALLED + number)


def _run() -> int:
    try:
        import rich as rich
        import typer
    except ModuleNotFoundError as error:
        if error.name not in {"rich", "typer"}:
            raise
        return _refuse("the command line needs typer and rich: pip install deltasync[cli]")
    from deltasync.cli.ending import with_exit_codes
    from deltasync.cli.terminal import printable

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help="Push only the changed weights from a trainer into inference engines.")(_root)
    for name in COMMANDS:
        app.command()(with_exit_codes(getattr(import_module(f"deltasync.cli.{name}"), name)))
    try:
        return app(prog_name="deltasync", standalone_mode=False) or 0
    except typer.BadParameter as error:
        line = error.format_message()
    except typer.TyperException as error:
        line = f"{error} See deltasync --help."
    return _refuse(printable(line))


def _root() -> None:
    """Nothing comes before the command; this keeps a lone command's name."""


def _refuse(line: str) -> int:
    print(line, file=sys.stderr)
    return USAGE_ERROR
