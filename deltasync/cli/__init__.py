"""The command line: `deltasync COMMAND`, one file per command."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from deltasync.cli.signals import (
    INTERRUPTED,
    READER_LEFT,
    handle_signals,
    silence,
    tell,
    was_interrupted,
)

COMMANDS = {
    "apply": ("deltasync.files.patch_file", "deltasync.store"),
    "demo": ("deltasync.demo.trainer", "deltasync.demo.report"),
    "diff": ("deltasync.files.patch_file", "deltasync.delta.sparsity", "deltasync.store"),
    "doctor": ("deltasync.cli.probes.checks",),
    "export": ("deltasync.files.export",),
    "fetch": ("deltasync.store.checkpoints",),
    "gc": ("deltasync.store.retention",),
    "log": ("deltasync.store.catalogue",),
    "report": ("deltasync.observe.report",),
    "verify": ("deltasync.files.comparing",),
}
"""By name: each command is a function in a module of this name; these modules it needs first."""

USAGE_ERROR, INTERNAL_ERROR = 2, 70


def main() -> None:
    """Run the command that `sys.argv` asks for, and exit with its code."""
    logging.getLogger("deltasync").addHandler(logging.NullHandler())  # commands report themselves
    if sys.stdout is None:  # closed, as some daemons leave it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    with _Ending():
        code = _run()
        sys.stdout.flush()
    sys.exit(code)


class _Ending:
    """Turns whatever ends the process into an exit code."""

    def __enter__(self) -> None:
        handle_signals()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if was_interrupted() or isinstance(error, KeyboardInterrupt):
            raise SystemExit(INTERRUPTED) from None
        # rich and typer make a SystemExit of a broken pipe.
        if isinstance(error, BrokenPipeError) or (
            isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        ):
            silence(sys.stdout)
            raise SystemExit(READER_LEFT) from None
        if isinstance(error, OSError):  # while modules were imported
            raise SystemExit(_refuse(f"{type(error).__name__}: {error}")) from None
        # Python had no memory for an error of its own, or the system none for a library.
        if isinstance(error, MemoryError | SystemError) or (
            isinstance(error, ImportError) and "failed to map segment" in str(error)
        ):
            said = f"{type(error).__name__}: {error}; not enough memory"
            raise SystemExit(_refuse(said)) from None
        if isinstance(error, Exception):
            tell("".join(traceback.format_exception(error)).rstrip())
            raise SystemExit(INTERNAL_ERROR) from None


def _run() -> int:
    try:
        import rich as rich
        import typer
    except ModuleNotFoundError as error:
        if error.name not in {"rich", "typer"}:
            raise
        return _refuse("the command line needs typer and rich: pip install typer rich")
    from deltasync.cli.app import make_app
    from deltasync.cli.terminal import printable

    app = make_app(COMMANDS)
    try:
        return app(prog_name="deltasync", standalone_mode=False) or 0
    except typer.BadParameter as error:
        line = error.format_message()
    except typer.TyperException as error:
        line = f"{error} See deltasync --help."
    except typer.Abort:  # what it makes of Ctrl-C
        return INTERRUPTED
    return _refuse(printable(line))


def _refuse(line: str) -> int:
    tell(line)
    return USAGE_ERROR
