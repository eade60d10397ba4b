"""Folders for what is fetched. Those of a process that was killed are removed by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

_PREFIX, _KEPT = "deltasync-fetched-", "deltasync-kept-"
_KEPT_S = 24 * 3600  # for the next one with the label
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class ScratchFolder:
    """A new folder, locked while its process lives. Folders beside it without a lock are removed;
    those with a label a day later, since several may have left one.

    Args:
        parent: Where it is made; None for the system's folder for temporary files.
        label: Who it is for, if the next one with this label is to find what is in it. That one
            takes the folder over, also from a process that was killed. None removes it at the end.

    Attributes:
        path: The folder.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, parent: str | Path | None = None, label: str | None = None) -> None:
        is_kept, lock = label is not None, None
        kind = _KEPT if is_kept else _PREFIX
        prefix = f"{kind}{label}-" if is_kept else kind
        beside = list(Path(parent or tempfile.gettempdir()).glob(f"{kind}*"))
        others = [other for other in beside if other.name.startswith(prefix)]
        while lock is None:  # until it was locked before another process took it
            if is_kept and others:
                self.path = others.pop()
                lock = _locked(self.path, is_ours=True)
            else:
                self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
                lock = _locked(self.path)
        for other in beside:
            is_due = other != self.path and (not is_kept or _age_s(other) > _KEPT_S)
            if is_due and (left := _locked(other, is_ours=True)) is not None:
                _close(other, left, os.getpid(), False)  # its process is gone
        self._give_up = weakref.finalize(self, _close, self.path, lock, os.getpid(), is_kept)

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


def _locked(folder: Path, *, is_ours: bool = False) -> int | None:
    """The descriptor that locks a folder; None if it is gone, or another process has it.

    Args:
        folder: A folder, or what has its name.
        is_ours: Whether to refuse it unless it belongs to this user, and locks work: where they do
            not, nothing is ever abandoned.
    """
    try:
        descriptor = os.open(folder, _FLAGS)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = not is_ours or os.fstat(descriptor).st_uid == os.geteuid()
    except OSError as error:
        is_free = not is_ours and not isinstance(error, BlockingIOError)
    if is_free and folder.exists():
        return descriptor
    os.close(descriptor)
    return None
