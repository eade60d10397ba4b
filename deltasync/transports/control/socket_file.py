"""Where a unix socket stands, and whose process is at its other end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import tempfile
from pathlib import Path

from deltasync.errors import ConfigError
from deltasync.transports import forks

_CREDENTIALS = struct.Struct("3i")  # of a process: its id, user and group


def private_path(name: str | None = None) -> Path:
    """A path for a socket in a directory that only this user can enter: made if there is none.

    The directory is `deltasync-UID` among the temporary files. `name` is what the socket is called
    there, by default one that nothing else has. Raises ConfigError if another user could write
    there.
    """
    folder = Path(tempfile.gettempdir()) / f"deltasync-{os.geteuid()}"
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


def listen(path: Path) -> tuple[socket.socket, int]:
    """A socket that listens on `path`, for this user alone, and the inode of its file.

    The file comes to stand there when it listens already, and not in the place of another one: of
    two senders that start at the same moment one has the path, and the other hears of it.
    """
    listener = forks.new_socket(socket.AF_UNIX)
    hidden = _hidden(path)
    try:
        _remove_stale(path)
        os.fchmod(listener.fileno(), 0o600)  # the file gets this mode, from the start
        listener.bind(str(hidden))
        try:
            listener.listen()
            os.link(hidden, path)
            return listener, hidden.lstat().st_ino
        finally:
            hidden.unlink()
    except BaseException as error:
        listener.close()
        if isinstance(error, FileExistsError):
            raise ConfigError(f"another sender listens on {path}") from error
        if isinstance(error, OSError):
            raise ConfigError(f"cannot listen on {path}: {error}") from error
        raise


def _hidden(path: Path) -> Path:
    """A path beside `path` that nothing has, and as long: a socket's must not be too long."""
    return path.with_name(f".{secrets.token_hex(4)}{path.name[9:]}")


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a sender that is dead."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket")
        is_live, moved = _is_live(path), _hidden(path)
        if not is_live:
            path.rename(moved)  # it may be that of one that has begun just now
            if is_live := _is_live(moved):
                os.link(moved, path)
            moved.unlink()
        if is_live:
            raise ConfigError(f"another sender listens on {path}")


def _is_live(path: Path) -> bool:
    """Whether a process listens on the socket file at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Not blocking: a live sender with a full backlog answers EAGAIN, which is life too.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            pass
    return True
