"""How every command ends: exit codes, Ctrl-C, a closed pipe, one line for an error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import ParamSpec

import typer

from deltasync.cli.signals import READER_LEFT, begin, silence, tell
from deltasync.cli.terminal import printable

FAILED, BAD_INPUT = 1, 2

_Options = ParamSpec("_Options")


def with_exit_codes(
    command: Callable[_Options, None], needed: Iterable[str]
) -> Callable[_Options, None]:
    """Return `command` with exit codes instead of exceptions.

    Args:
        command: The command.
        needed: Modules that are imported first, while there is nothing to clean up.
    """

    @functools.wraps(command)
    def ended(*args: _Options.args, **kwargs: _Options.kwargs) -> None:
        from deltasync.errors import DeltaSyncError, DigestMismatch, WireError

        try:
            for name in needed:
                import_module(name)
            begin()
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            silence(sys.stdout)
            raise typer.Exit(READER_LEFT) from None
        except DigestMismatch as error:
            raise told(error, FAILED) from None
        except WireError as error:
            raise told(error, BAD_INPUT, hint="; deltasync verify FILE says where") from None
        except DeltaSyncError as error:
            raise told(error, BAD_INPUT) from None
        except OSError as error:  # such as a full disk, to which stdout may go
            silence(sys.stdout)
            raise told(error, BAD_INPUT) from None
        except (MemoryError, RuntimeError) as error:
            from deltasync.delta.memory import is_lack_of_memory

            if not is_lack_of_memory(error):
                raise
            raise told(error, BAD_INPUT, hint="; not enough memory") from None

    return ended


def told(error: Exception, code: int, *, hint: str = "") -> typer.Exit:
    """Print what went wrong in one line. Returns the exception to raise."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}{hint}"
    tell(printable(line))
    return typer.Exit(code)
