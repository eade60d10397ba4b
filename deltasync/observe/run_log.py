"""A log of a run: one line of JSON for each sync, which `deltasync report` draws."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from deltasync import __version__
from deltasync.files.output import open_to_append
from deltasync.observe.run_lines import FORMAT
from deltasync.store.sender import PublishStats
from deltasync.sync.events import ReceiveStats, SyncEvent, SyncFailed
from deltasync.sync.stats import SyncStats
from deltasync.transports.base import Closing

logger = logging.getLogger(__name__)

_KINDS = {
    SyncStats: "sync",
    ReceiveStats: "receive",
    PublishStats: "publish",
    SyncFailed: "failed",
}
_LEFT_OUT = {"ended_at", "engines"}
_LONGEST = 2000  # characters of a message


class RunLog(Closing):
    """A listener that appends one JSON line for each event to a file, in one write.

    A process that is killed leaves at most a last line that is torn; `deltasync report` skips it,
    and a later `RunLog` on the same file begins a new line. If a line cannot be written, as on a
    full disk, that is logged once and no sync is affected. Threads may share one; give each process
    a file of its own.

    Args:
        path: The file. It is made if it is missing, otherwise it is continued. Or a character
            device, such as /dev/stderr on a terminal.

    Raises:
        ConfigError: The file cannot be opened, or is a pipe.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_to_append(path)
        self._path, self._lock = path, threading.Lock()
        self._has_failed = self._is_closed = False
        size = os.fstat(self._file).st_size
        self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        run = {"event": "run", "time": time.time(), "format": FORMAT, "deltasync": __version__}
        self._write(run | {"process": os.getpid()})

    def __call__(self, event: SyncEvent) -> None:
        """Append a line."""
        if (kind := _KINDS.get(type(event))) is not None:
            with self._lock:
                if not self._is_closed:
                    self._write({"event": kind, **_fields(event)})

    def close(self) -> None:
        """Write no more. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._file)

    def _write(self, record: dict[str, Any]) -> None:
        # What is no Unicode, as of a path that is not UTF-8, becomes a "?".
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
        line = text.encode(errors="replace") + b"\n"
        if self._is_torn:
            line = b"\n" + line
        try:
            self._is_torn = os.write(self._file, line) < len(line)
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s: %s; lines are missing from now on", self._path, error.strerror)
            self._has_failed = True


def _fields(event: SyncEvent) -> dict[str, Any]:
    """Its fields that are known, and when it was."""
    found = {each.name: getattr(event, each.name) for each in fields(event)}  # type: ignore[arg-type]
    if isinstance(event, SyncFailed):
        found["error"], found["message"] = type(event.error).__name__, str(event.error)[:_LONGEST]
    kept = {n: v for n, v in found.items() if v is not None and n not in _LEFT_OUT}
    return {"time": found["ended_at"], **kept}
