"""Where a unix socket stands, and whose process is at its other end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltasync.errors import ConfigError
from deltasync.transports import forks
from deltasync.transports.control.connection import Deadline

_CREDENTIALS = struct.Struct("3i")  # of a process: its id, user and group
_RUNTIME = "/run/user"
_LOCK_TIMEOUT_S, _LOCK_RETRY_S = 5.0, 0.01


def private_path(name: str | None = None) -> Path:
    """A path for a socket in a directory that only this user can enter: made if there is none.

    The directory is `deltasync` in /run/user/UID, which is where XDG_RUNTIME_DIR leads on Linux, or
    else `deltasync-UID` among the temporary files. `name` is what the socket is called there, by
    default one that nothing else has. Raises ConfigError if another user could write there.
    """
    user = os.geteuid()
    runtime = Path(_RUNTIME, str(user))
    folder = Path(tempfile.gettempdir()) / f"deltasync-{user}"
    if runtime.is_dir() and os.access(runtime, os.W_OK) and _others(runtime) is None:
        folder = runtime / "deltasync"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if problem := _others(folder):
        raise ConfigError(f"{folder} {problem}; remove it, or give a path in a directory of yours")
    return folder / (name or f"{secrets.token_hex(8)}.sock")


def _others(folder: Path) -> str | None:
    """How users other than this one could get into `folder`; None if they could not."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, not 0700"
    return None


def check_user(sock: socket.socket) -> None:
    """Raise PermissionError unless a process of this user, or of root, is at the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise PermissionError(f"the other end belongs to user {user}, not to {os.geteuid()}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other senders of this user from claiming `path` at the same moment.

    The lock is a file that no other user can open: who can lock it could hold up senders for ever.
    """
    lock = path.with_name(f".{path.name}.lock")
    deadline = Deadline(_LOCK_TIMEOUT_S)
    while (descriptor := _lock(lock)) is None:
        if deadline.passed:
            raise ConfigError(f"another process has held {lock} for {_LOCK_TIMEOUT_S} s")
        time.sleep(_LOCK_RETRY_S)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """The descriptor of the file at `path`, locked, or None while another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to another user; use a directory of yours")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # held, or removed by who held it last
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def listen(path: Path) -> socket.socket:
    """A socket that listens on `path`, for this user alone."""
    listener = forks.new_socket(socket.AF_UNIX)
    try:
        with _locked(path):
            _remove_stale(path)
            os.fchmod(listener.fileno(), 0o600)  # the file gets this mode, from the start
            listener.bind(str(path))
            listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a sender that is dead."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Not blocking: a live sender with a full backlog answers EAGAIN, which is life too.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"another sender listens on {path}")
