"""Folders for what is fetched. Those of a process that was killed are removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "deltasync-fetched-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class ScratchFolder:
    """A new folder, locked while its process lives. Folders beside it without a lock are removed.

    Args:
        parent: Where it is made; None for the system's folder for temporary files.

    Attributes:
        path: The folder.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, parent: str | Path | None = None) -> None:
        self._lock: int | None = None
        while self._lock is None:  # until it was locked before another process removed it
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _locked(self.path)
        for other in self.path.parent.glob(f"{_PREFIX}*"):
            if other != self.path:
                _remove_abandoned(other)

    def close(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """The descriptor that locks a folder; None if the folder is gone."""
    try:
        descriptor = os.open(folder, _FLAGS)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks, where nothing is ever abandoned
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if folder.exists():
        return descriptor
    os.close(descriptor)
    return None


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that no process has locked, if this user may."""
    with suppress(OSError):
        descriptor = os.open(folder, _FLAGS)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
