"""A log of a run: one line of JSON for each sync, which `deltasync report` draws."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from deltasync import __version__
from deltasync.files.output import open_to_append
from deltasync.observe.run_lines import FORMAT, ROLES
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, SyncEvent, SyncFailed
from deltasync.sync.stats import SyncStats
from deltasync.transports import forks
from deltasync.transports.base import Closing

logger = logging.getLogger(__name__)

_KINDS = {SyncStats: "sync", ReceiveStats: "receive", PublishStats: "publish"}
_LEFT_OUT = {"ended_at", "engines"}
_LONGEST = 2000  # characters of a message
_MOST_STREAKS = 256  # ends whose failures are counted at the same time

_End = tuple[str, str]  # the role and name of what has failed


@dataclass(slots=True)
class _Streak:
    """Failures of one end with the same text.

    Attributes:
        last: The last one, as it is written.
        length: How many there were.
        unwritten: How many of them no line stands for yet.
    """

    last: dict[str, Any] = field(default_factory=dict)
    length: int = 0
    unwritten: int = 0


class RunLog(Closing):
    """A listener that appends one JSON line for each event to a file, in one write.

    A process that is killed leaves at most a last line that is torn; `deltasync report` skips it,
    and a later `RunLog` on the same file begins a new line. If a line cannot be written, as on a
    full disk, that is logged once and no sync is affected. A failure that repeats at one end is
    written the first, second, fourth, eighth ... time and the last; each line says how many
    failures it stands for. Threads may share one; give each process a file of its own; a forked
    child writes nothing.

    Args:
        path: The file. It is made if it is missing, otherwise it is continued. Or a character
            device, such as /dev/stderr on a terminal.

    Raises:
        ConfigError: The file cannot be opened, or is a pipe.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_to_append(path)
        self._path, self._lock = path, threading.Lock()
        self._streaks: dict[_End, _Streak] = {}  # in the order of their last failures
        self._has_failed = self._is_closed = False
        self._is_torn = not _ends_a_line(self._file)
        run = {"event": "run", "time": time.time(), "format": FORMAT, "deltasync": __version__}
        self._write(run | {"process": os.getpid()})
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        """The file is the parent's."""
        self._lock, self._is_closed = threading.Lock(), True

    def __call__(self, event: SyncEvent) -> None:
        """Append a line."""
        with self._lock:
            if self._is_closed:
                return
            if isinstance(event, SyncFailed):
                self._write_failure(event)
            elif (kind := _KINDS.get(type(event))) is not None:
                self._end_streak((ROLES[kind], getattr(event, "name", "")))
                self._write({"event": kind, **_fields(event)})

    def close(self) -> None:
        """Write what is left of failures that repeat, and no more. Idempotent."""
        with self._lock:
            if not self._is_closed:
                for end in tuple(self._streaks):
                    self._end_streak(end)
                self._is_closed = True
                os.close(self._file)

    def _write_failure(self, event: SyncFailed) -> None:
        end, failure = (event.role, event.name), _failure_of(event)
        streak = self._streaks.get(end)
        if streak is None or any(streak.last[key] != failure[key] for key in ("error", "message")):
            self._end_streak(end)
            streak = _Streak()
        self._streaks.pop(end, None)
        self._streaks[end] = streak
        streak.last = failure
        streak.length += 1
        streak.unwritten += 1
        if streak.length & (streak.length - 1) == 0:
            self._write_last(streak)
        if len(self._streaks) > _MOST_STREAKS:
            self._end_streak(next(iter(self._streaks)))

    def _end_streak(self, end: _End) -> None:
        """Write its last failure, if it was not written."""
        streak = self._streaks.pop(end, None)
        if streak is not None and streak.unwritten:
            self._write_last(streak)

    def _write_last(self, streak: _Streak) -> None:
        self._write(streak.last | {"repeated": streak.unwritten})
        streak.unwritten = 0

    def _write(self, record: dict[str, Any]) -> None:
        line = _line_of(record)
        if self._is_torn:
            line = b"\n" + line
        try:
            self._is_torn = os.write(self._file, line) < len(line)
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s: %s; lines are missing from now on", self._path, error.strerror)
            self._has_failed = True


def _line_of(record: dict[str, Any]) -> bytes:
    """A line of ASCII; what is no Unicode, as of a path that is not UTF-8, becomes a "?"."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    if not text.isascii():
        text = json.dumps(json.loads(text.encode(errors="replace")), separators=(",", ":"))
    return text.encode() + b"\n"


def _failure_of(event: SyncFailed) -> dict[str, Any]:
    return {
        "event": "failed",
        "time": event.ended_at,
        "role": event.role,
        "name": event.name,
        "stream_id": event.stream_id,
        "version": event.version,
        "error": type(event.error).__name__,
        "message": str(event.error)[:_LONGEST],
        "lost": event.lost,
        "is_dirty": event.is_dirty,
        "corrupted": event.corrupted,
        "total_s": event.total_s,
        "phases": event.phases,
    }


def _ends_a_line(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _fields(event: SyncEvent) -> dict[str, Any]:
    """Its fields, and when it was."""
    found = {each.name: getattr(event, each.name) for each in fields(event)}  # type: ignore[arg-type]
    return {"time": found["ended_at"]} | {n: v for n, v in found.items() if n not in _LEFT_OUT}
