"""Objects of a store, on obstore: bytes by key, with limits, and typed errors.

Every call ends within the limits of its options. A failure is a StoreUnavailable if it may pass,
and a StoreRefused if it needs somebody to do something.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import Field, SecretBytes

from deltasync.delta.options import OptionsModel
from deltasync.errors import ConfigError, ObjectDamaged, StoreRefused, StoreUnavailable
from deltasync.files.output import flush_to_disk
from deltasync.transports.control.connection import LONGEST_S

Data = bytes | bytearray | memoryview
Result = TypeVar("Result")

_LEAST_PART_BYTES = 5 << 20  # that S3 takes
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_OS_ERROR, _NOT_FOUND, _NO_ACCESS = re.compile(r"\(os error \d+\)"), 404, re.compile(r"code: 4\d\d")
_MEMORIES: dict[str, Any] = {}  # of this process, by name
_process: dict[str, int] = {}  # which has used obstore first


class StoreOptions(OptionsModel):
    """How a store is reached. Times in seconds, sizes in bytes."""

    timeout_s: float = Field(
        default=60.0, gt=0, le=LONGEST_S, description="for one request, its data included"
    )
    retries: int = Field(default=8, ge=0, description="of a request that failed")
    retry_timeout_s: float = Field(
        default=180.0, gt=0, le=LONGEST_S, description="after which a request is not tried again"
    )
    part_bytes: int = Field(
        default=16 << 20,
        ge=_LEAST_PART_BYTES,
        description="of one request: larger objects are read and written in parts",
    )
    parallel: int = Field(default=4, ge=1, le=64, description="parts in flight at once")
    config: dict[str, str] = Field(
        default_factory=dict,
        repr=False,  # it may have secrets
        description="of the object store, as obstore names it: endpoint, region, access_key_id, "
        "...; environment variables of the provider are read too",
    )
    mac_key: SecretBytes | None = Field(
        default=None, description="signs manifests; readers that have it accept no others"
    )

    @property
    def mac(self) -> bytes | None:
        """The key itself."""
        return None if self.mac_key is None else self.mac_key.get_secret_value()


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a store says of an object.

    Attributes:
        key: Within the store.
        num_bytes: Its length.
        modified: When it was written, by the store's clock.
    """

    key: str
    num_bytes: int
    modified: datetime


class Objects:
    """The objects under a prefix.

    Args:
        url: A local path, in which a leading ~ is the home folder, `file:///path`, `memory://name`
            (within this process), or what obstore knows: `s3://bucket/prefix`,
            `gs://bucket/prefix`, `az://container/prefix`. Keys are relative to it.
        options: Limits, and how to reach the store.
        make: Whether a local folder is made if it does not exist.

    Attributes:
        url: As given.
        options: As given.
        folder: Where the objects are, if they are files of this machine; None otherwise.

    Raises:
        ConfigError: The URL or an option is wrong, or obstore is not installed.
        StoreRefused: The folder does not exist, or cannot be used.
    """

    def __init__(
        self, url: str | Path, options: StoreOptions | None = None, *, make: bool = False
    ) -> None:
        self.url, self.options = str(url), options or StoreOptions()
        self._obstore = _load()
        self.folder = _folder_of(self.url)
        with self._answered("open"):
            self._store = self._open(make)

    def get(self, key: str, *, max_bytes: int) -> bytes | None:
        """A small object; None if there is none.

        Raises ObjectDamaged if it has more than `max_bytes`, or is a pipe or a device.
        """
        self._check_no_pipe(key)
        with suppress(FileNotFoundError), self._answered(key):
            found = self._wait(self._obstore.get, self._store, key)
            size = found.meta["size"]
            if size > max_bytes:
                raise ObjectDamaged(f"{key}: {size} bytes, at most {max_bytes} are expected")
            return bytes(self._wait(found.bytes))
        return None

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of an object, some at least and at most `options.part_bytes`.

        Raises ObjectDamaged if the object does not exist, ends within them, or is no file.
        """
        self._check_no_pipe(key)
        try:
            with self._answered(key):
                get_range = self._obstore.get_range
                data = memoryview(self._wait(get_range, self._store, key, start=start, end=stop))
        except FileNotFoundError:
            raise ObjectDamaged(f"{key} does not exist: it was deleted") from None
        if len(data) != stop - start:
            raise ObjectDamaged(f"{key} ends after {start + len(data)} bytes: it was altered")
        return data

    def head(self, key: str) -> ObjectFacts | None:
        """What the store says of an object; None if there is none."""
        with suppress(FileNotFoundError), self._answered(key):
            return _facts(self._wait(self._obstore.head, self._store, key))
        return None

    def listed(self, folder: str, *, after: str | None = None) -> Iterator[ObjectFacts]:
        """All objects in a folder and below, in no order; those whose keys come later than `after`.

        What is written meanwhile may be there or not.
        """
        with self._answered(folder):
            batches = self._obstore.list(self._store, folder, offset=after, chunk_size=1000)
        while True:
            with self._answered(folder):
                batch = self._wait(next, batches, None)
            if batch is None:
                return
            yield from map(_facts, batch)

    def create(self, key: str, data: bytes) -> bool:
        """Put a small object if there is none. Returns False if there is another one.

        An object with these very bytes counts as put: an answer may have been lost.
        """
        try:
            self._twice(key, lambda: self._create(key, data))
        except self._obstore.exceptions.AlreadyExistsError:
            return self.get(key, max_bytes=max(len(data), 64 << 20)) == data
        return True

    def write(self, key: str, parts: Callable[[], Iterable[Data]]) -> tuple[int, str]:
        """Write a large object in parts. It appears as a whole, or not at all.

        Args:
            key: A new name.
            parts: Makes its bytes, piece by piece; called once more if the store fails. Pieces are
                taken one by one, and are not changed before the next is asked for.

        Returns:
            (its length in bytes, its SHA-256).
        """
        return self._twice(key, lambda: self._put_parts(key, parts()))

    def delete(self, key: str) -> None:
        """Delete an object, if there is one. In a folder, none that a symbolic link leads to."""
        with suppress(FileNotFoundError), self._answered(key):
            if self.folder is None:
                self._wait(self._obstore.delete, self._store, key)
                return
            _unlink(self.folder, key)

    def _open(self, make: bool) -> Any:
        if self.folder is not None:
            if not make and not self.folder.is_dir():
                raise StoreRefused(f"{self.folder}: there is no such folder; check the path")
            return self._obstore.store.LocalStore(prefix=self.folder, mkdir=make)
        if self.url.startswith("memory:"):
            return _MEMORIES.setdefault(self.url, self._obstore.store.MemoryStore())
        return self._open_remote()

    def _open_remote(self) -> Any:
        options = self.options
        try:
            return self._obstore.store.from_url(
                self.url,
                config=dict(options.config),
                client_options={
                    "timeout": timedelta(seconds=options.timeout_s),
                    "connect_timeout": timedelta(seconds=min(options.timeout_s, 10.0)),
                    "allow_http": options.config.get("endpoint", "").startswith("http://"),
                },
                retry_config={
                    "max_retries": options.retries,
                    "retry_timeout": timedelta(seconds=options.retry_timeout_s),
                },
            )
        except (self._obstore.exceptions.BaseError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.url}: {_first_line(error)}") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # as obstore ends at some unknown options
                raise
            known = ", ".join(sorted(options.config))
            raise ConfigError(f"{self.url}: obstore does not take one of: {known}") from None

    def _create(self, key: str, data: bytes) -> None:
        put = self._obstore.put
        self._wait(put, self._store, key, data, mode="create", use_multipart=False)
        self._sync(key)

    def _put_parts(self, key: str, parts: Iterable[Data]) -> tuple[int, str]:
        size, parallel = self.options.part_bytes, self.options.parallel
        sha256, num_bytes = hashlib.sha256(), 0

        def hashed() -> Iterator[Data]:
            nonlocal num_bytes
            for part in parts:
                sha256.update(part)
                num_bytes += len(part)
                yield part

        put = self._obstore.put
        put(self._store, key, hashed(), chunk_size=size, max_concurrency=parallel)
        self._sync(key)
        return num_bytes, sha256.hexdigest()

    def _twice(self, key: str, put: Callable[[], Result]) -> Result:
        """Once more if there is no answer: the request may have been done.

        S3 does not find an upload that it has ended.
        """
        with suppress(StoreUnavailable, FileNotFoundError), self._answered(key):
            return put()
        try:
            with self._answered(key):
                return put()
        except FileNotFoundError as error:
            raise self._unavailable(key, error) from None

    def _wait(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a call of obstore returns. A Ctrl-C ends the wait, if not the request."""
        if self.folder is not None or threading.current_thread() is not threading.main_thread():
            return call(*args, **options)
        return started(call, *args, **options).result()

    def _sync(self, key: str) -> None:
        """Make a file survive a loss of power, and its name, before anything names it."""
        if self.folder is not None:
            path = self.folder / key
            try:
                for one in (path, *list(path.parents)[: key.count("/") + 2]):
                    flush_to_disk(one)
            except FileNotFoundError as error:  # deleted, or the folder moved, just now
                raise self._unavailable(key, error) from None

    def _check_no_pipe(self, key: str) -> None:
        """Raise ObjectDamaged for what might be read for ever: whoever writes here can make it."""
        if self.folder is not None:
            with suppress(OSError):  # which obstore meets too
                mode = (self.folder / key).stat().st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise ObjectDamaged(f"{key} is a pipe or a device, not a file: remove it")

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        """Turns what obstore raises into our errors, but for what callers look at.

        These are FileNotFoundError, and that an object exists already or is another one.
        """
        _check_process(self.url)
        errors = self._obstore.exceptions
        try:
            yield
        except (errors.AlreadyExistsError, errors.PreconditionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise self._refused(what, error) from None
            raise
        except errors.GenericError as error:
            text = str(error)
            if _OS_ERROR.search(_first_line(error)) and self.folder is not None:
                raise self._refused(what, error) from None
            if _NO_ACCESS.search(text) and "code: 429" not in text and "code: 408" not in text:
                raise self._refused(what, error) from None
            raise self._unavailable(what, error) from None
        except (errors.BaseError, OSError) as error:
            raise self._refused(what, error) from None

    def _unavailable(self, what: str, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.url}: {what}: {_first_line(error)}; check the network and the store, then try "
            "again"
        )

    def _refused(self, what: str, error: Exception) -> StoreRefused:
        return StoreRefused(
            f"{self.url}: {what}: {_first_line(error)}; check space, permissions, credentials and "
            "the name of the bucket or folder"
        )


def _facts(meta: Any) -> ObjectFacts:
    return ObjectFacts(meta["path"], meta["size"], meta["last_modified"])


def started(call: Callable[..., Result], *args: Any, **options: Any) -> Future[Result]:
    """A call in a thread of its own, for which the end of the process does not wait."""
    future = Future[Result]()

    def run() -> None:
        with ExitStack() as stack:
            stack.push(lambda kind, error, traceback: _failed(future, error))
            future.set_result(call(*args, **options))

    try:
        threading.Thread(target=run, name="deltasync-store", daemon=True).start()
    except RuntimeError:  # there is no room for one more, or the process ends
        run()
    return future


def _failed(future: Future[Result], error: BaseException | None) -> bool:
    """What a call raised is raised where its result is asked for."""
    if error is not None:
        future.set_exception(error)
    return True


def _check_process(url: str) -> None:
    """Refuse to wait for threads of obstore's that stayed behind in a fork: for ever."""
    if os.getpid() != _process.setdefault("first", os.getpid()):
        raise StoreRefused(
            f"{url}: this process was forked from one that used a store, which its threads did not "
            "survive: start it by spawn or forkserver, or use no store before the fork"
        )


def _unlink(folder: Path, key: str) -> None:
    """Delete a file below a folder. Raises StoreRefused if a link on its way leads elsewhere."""
    *parents, name = key.split("/")
    opened = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        for parent in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            opened.append(os.open(parent, flags, dir_fd=opened[-1]))
        os.unlink(name, dir_fd=opened[-1])
        if len(parents) > 1:  # the folder of an anchor, which may be empty now
            with suppress(OSError):
                os.rmdir(parents[-1], dir_fd=opened[-2])
    except NotADirectoryError:
        raise StoreRefused(
            f"{folder / key}: lies behind a symbolic link, where nothing is deleted: remove the "
            "link, or put in its place what it leads to"
        ) from None
    finally:
        for at in opened:
            os.close(at)


def _first_line(error: BaseException) -> str:
    """What an error says, without obstore's account of its source, and not too long."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())[:400]


def _folder_of(url: str) -> Path | None:
    if not url or url[:5].lower() == "file:":
        if not url.startswith("file:///"):
            raise ConfigError(f"{url!r} names no folder: give a path, or file:///path")
        return Path(url.removeprefix("file://"))
    return None if _SCHEME.match(url) else Path(os.path.expanduser(url)).absolute()


def _load() -> ModuleType:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ModuleNotFoundError:
        raise ConfigError("stores need obstore: pip install obstore") from None
    return obstore
