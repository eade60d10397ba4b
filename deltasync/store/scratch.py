"""Folders for what is fetched. What a process that was killed has left, the next one takes over."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

_PREFIX = "deltasync-fetched-"
_KEPT_S = 24 * 3600  # for the next one with the label
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class ScratchFolder:
    """A folder that is locked while its process lives.

    It is one that nobody uses any more, of the same label, or a new one. Others that nobody has
    used for a day are removed.

    Args:
        parent: Where it is made; None for the system's folder for temporary files.
        label: Who it is for; what is in it at the end is left to the next one with this label. None
            to remove it at the end.

    Attributes:
        path: The folder.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, parent: str | Path | None = None, label: str | None = None) -> None:
        prefix, lock = f"{_PREFIX}{label or 'any'}-", None
        beside = list(Path(parent or tempfile.gettempdir()).glob(f"{_PREFIX}*"))
        left = [other for other in beside if other.name.startswith(prefix)]
        while lock is None:  # until it was locked before another process took it
            is_new = not left
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)) if is_new else left.pop()
            lock = _locked(self.path, is_new=is_new)
        for other in beside:
            if _age_s(other) > _KEPT_S and (abandoned := _locked(other)) is not None:
                _close(other, abandoned, os.getpid(), False)
        self._give_up = weakref.finalize(
            self, _close, self.path, lock, os.getpid(), label is not None
        )

    def close(self) -> None:
        """Give it up. It is removed with all that is in it, unless it has a label. Idempotent."""
        self._give_up()


def _close(folder: Path, lock: int, process: int, is_kept: bool) -> None:
    if os.getpid() == process:  # to a child of it the folder does not belong
        if not is_kept or not any(folder.glob("*")):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _age_s(folder: Path) -> float:
    """How long ago something was made in it; 0 if it is gone."""
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0


def _locked(folder: Path, *, is_new: bool = False) -> int | None:
    """The descriptor that locks a folder; None if it is gone, or not this user's, or in use.

    Where locks do not work, no folder but a new one is locked: nobody knows whether it is in use.
    """
    try:
        descriptor = os.open(folder, _FLAGS)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = is_new or os.fstat(descriptor).st_uid == os.geteuid()
    except OSError as error:
        is_free = is_new and not isinstance(error, BlockingIOError)
    if is_free and folder.exists():
        return descriptor
    os.close(descriptor)
    return None
