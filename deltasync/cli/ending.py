"""How every command ends: exit codes, Ctrl-C, a reader that leaves, one line for an error."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from deltasync.cli.terminal import printable

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

_Options = ParamSpec("_Options")


def with_exit_codes(command: Callable[_Options, None]) -> Callable[_Options, None]:
    """`command`, ended by an exit code instead of what it raises."""

    @functools.wraps(command)
    def ended(*args: _Options.args, **kwargs: _Options.kwargs) -> None:
        from deltasync.errors import DeltaSyncError, DigestMismatch, WireError

        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # whoever read stdout has left, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except DigestMismatch as error:
            raise told(error, FAILED) from None
        except WireError as error:
            raise told(error, BAD_INPUT, hint="; deltasync inspect says where") from None
        except DeltaSyncError as error:
            raise told(error, BAD_INPUT) from None
        except OSError as error:  # such as a disk that is full, with what stdout goes to
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise told(error, BAD_INPUT) from None

    return ended


def told(error: Exception, code: int, *, hint: str = "") -> typer.Exit:
    """Say in one line what went wrong. Returns what to raise."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}{hint}"
    print(printable(line), file=sys.stderr)
    return typer.Exit(code)
