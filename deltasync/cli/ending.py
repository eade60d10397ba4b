"""How every command ends: the exit code of an error, and the one line that reports it."""

from __future__ import annotations

import sys
import traceback

from deltasync.cli.signals import INTERRUPTED, READER_LEFT, interruption, silence, tell
from deltasync.errors import DeltaSyncError, DigestMismatch

FAILED, BAD_INPUT, INTERNAL_ERROR = 1, 2, 70


def printable(text: str) -> str:
    """One line, with control and invisible characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def exit_code(error: BaseException) -> int:
    """Report what ended a command. Returns its exit code."""
    if interruption.has_come:
        return INTERRUPTED
    is_exit = isinstance(error, SystemExit)
    # rich and typer make a SystemExit of a broken pipe.
    if isinstance(error.__context__ if is_exit else error, BrokenPipeError):
        silence(sys.stdout)
        return READER_LEFT
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    if hasattr(error, "format_message"):  # of typer
        tell(printable(error.format_message()))
        return BAD_INPUT
    if isinstance(error, ModuleNotFoundError) and error.name in {"rich", "typer"}:
        tell("the command line needs typer and rich: pip install typer rich")
        return BAD_INPUT
    if isinstance(error, DeltaSyncError):
        return report(error, FAILED if isinstance(error, DigestMismatch) else BAD_INPUT)
    if isinstance(error, OSError):  # such as a full disk, to which stdout may go
        silence(sys.stdout)
        return report(error, BAD_INPUT)
    if _is_lack_of_memory(error):
        return report(error, BAD_INPUT, "; not enough memory")
    tell("".join(traceback.format_exception(error)).rstrip())
    return INTERNAL_ERROR


def report(error: BaseException, code: int, hint: str = "") -> int:
    """Report an error in one line. Returns `code`."""
    tell(printable(f"{type(error).__name__}: {' '.join(str(error).split())}{hint}"))
    return code


def _is_lack_of_memory(error: BaseException) -> bool:
    """Also if Python had no memory for an error of its own, or the system none for a library."""
    if isinstance(error, ImportError) and "failed to map segment" in str(error):
        return True
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError | SystemError)
    from deltasync.delta.memory import is_lack_of_memory

    return is_lack_of_memory(error)
