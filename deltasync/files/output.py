"""Files that commands and calls write: whole or not at all, and never in the place of others.

There is one way for all of them:

- A file is made in a new folder beside it, which has a random name and which only this user can
  enter. It gets its own name when it is complete, with the permissions that the umask leaves.
- What is there stays and is refused, of whatever kind it is. `write_output` and
  `appearing(replaces=True)` replace a regular file, and nothing else: the new file keeps the
  permissions of the old one, and belongs to this user.
- A link is not replaced, and not followed to a file, so nobody can lead a write elsewhere. Only a
  run log, which is continued, follows links, as a shell's `>>` does.
- A device or pipe is written into by `write_output`, also behind a link such as /dev/stdout.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltasync.errors import ConfigError


def write_output(path: Path, data: bytes) -> None:
    """Write a file in the place of a regular file, if there is one, or into a device or pipe.

    Raises:
        ConfigError: Something else has this name, or it cannot be written.
        BrokenPipeError: The reader of the pipe has left.
    """
    if _is_stream(path):
        _write_into(path, data)
        return
    with appearing(path, replaces=True) as made, made.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_to_append(path: str | Path) -> int:
    """The descriptor of a file that is made or continued, or of a character device.

    Raises ConfigError for anything else: a pipe that nobody reads would stop its writer.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        os.close(descriptor)
        raise ConfigError(f"{path} is not a regular file: give the name of a file")
    return descriptor


@contextmanager
def appearing(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary name beside `path`; what is made there is renamed to `path` on success.

    Raises:
        ConfigError: `path` exists, unless it is a regular file and this replaces it; or nothing can
            be written there.
    """
    _check_place(path, replaces=replaces)
    try:
        with _folder_beside(path) as folder, _synced(path.parent):
            made = folder / path.name
            yield made
            if (permissions := _check_place(path, replaces=replaces)) is not None:
                made.chmod(permissions)
            made.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def flush_to_disk(path: Path) -> None:
    """Return when a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_existing(path: Path) -> None:
    """Raise ConfigError if something has this name."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists; choose another name, or remove it")


def _check_place(path: Path, *, replaces: bool) -> int | None:
    """The permissions of the file that is replaced; None if none is. Raises ConfigError."""
    if not replaces:
        refuse_existing(path)
        return None
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        is_link = stat.S_ISLNK(mode)
        what = "a link: name what it leads to, or" if is_link else "not a regular file:"
        raise ConfigError(f"{path} is {what} choose another name")
    return stat.S_IMODE(mode) & 0o777


def _is_stream(path: Path) -> bool:
    """Whether it is written into, and has no content of its own to lose."""
    with suppress(OSError):  # which is met again
        mode = path.stat().st_mode
        return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)
    return False


def _write_into(path: Path, data: bytes) -> None:
    try:
        # Not blocking, or it would wait for a reader.
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "wb") as stream:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path} was replaced by a file meanwhile: try again")
            os.set_blocking(descriptor, True)
            stream.write(data)
    except BrokenPipeError:
        raise
    except OSError as error:
        why = "no process reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise ConfigError(f"{path}: {why or error}") from error


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A new folder, by a name that leads to it whatever others do with the one that it was given.

    Whoever may write beside it may rename it, and put a link to other files in its place.
    """
    try:
        given = tempfile.mkdtemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"{path.parent}: {error.strerror or error}") from error
    try:
        descriptor = os.open(given, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid() or os.listdir(descriptor):
                raise ConfigError(f"{given} was replaced meanwhile: let nobody else write there")
            held = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            folder = held if held.exists() else Path(given)  # not every system has such names
            try:
                yield folder
            finally:
                _remove(folder)
        finally:
            os.close(descriptor)
    finally:
        with suppress(OSError):
            os.rmdir(given)


@contextmanager
def _synced(folder: Path) -> Iterator[None]:
    """Make a rename inside survive a loss of power. If this is impossible, raises before it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible, with one descriptor at a time: others may be used up."""
    for found, _, names in os.walk(folder, topdown=False):
        for name in names:
            with suppress(OSError):
                os.unlink(os.path.join(found, name))
        with suppress(OSError):
            os.rmdir(found)
