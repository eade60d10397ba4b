"""Objects on this machine: fetched in parts, checked by length and SHA-256 before they are read."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from deltasync.errors import ConfigError, ObjectDamaged, TransportTimeout
from deltasync.store.manifest import StoredFile, Way
from deltasync.store.objects import Objects

Advance = Callable[[int], None]


class Fetched:
    """A folder of fetched objects, which is removed by `close`.

    Args:
        objects: The objects of a run.
        folder: Where the folder is made; None for the system's folder for temporary files.

    Raises:
        ConfigError: It cannot be made.
    """

    def __init__(self, objects: Objects, folder: str | Path | None = None) -> None:
        self._objects = objects
        try:
            self.path = Path(tempfile.mkdtemp(prefix="deltasync-", dir=folder))
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror or error}") from error

    def close(self) -> None:
        """Remove everything. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)

    def fetch(
        self, way: Way, *, check_time: Callable[[], None], advance: Advance = lambda num_bytes: None
    ) -> Path:
        """Fetch the files of a way, or find them here. Returns their folder.

        Args:
            way: What to fetch.
            check_time: Called between parts; what it raises ends the call.
            advance: Called with the bytes that have come.

        Raises:
            ObjectDamaged: An object is missing, or is not what the manifest names.
            StoreError: The store did not answer.
            ConfigError: The disk is full, or cannot be written.
        """
        folder = self.path / way.files[0].sha256
        try:
            folder.mkdir(exist_ok=True)
            for file in way.files:
                made = folder / Path(file.key).name
                if made.exists():
                    advance(file.bytes)
                    continue
                self._fetch_file(file, made, check_time, advance)
        except OSError as error:
            if isinstance(error, TransportTimeout):
                raise
            raise ConfigError(
                f"{self.path}: {error.strerror or error}: free some space, or name another folder "
                "for what is fetched"
            ) from error
        return folder

    def _fetch_file(
        self, file: StoredFile, made: Path, check_time: Callable[[], None], advance: Advance
    ) -> None:
        partial = made.with_name(f".{made.name}.part")
        digest = hashlib.sha256()
        try:
            with partial.open("wb") as out:
                for part in self._parts(file, check_time):
                    digest.update(part)
                    out.write(part)
                    advance(len(part))
            if digest.hexdigest() != file.sha256:
                raise ObjectDamaged(f"{file.key} was altered: its SHA-256 is another")
            partial.rename(made)
        finally:
            partial.unlink(missing_ok=True)

    def _parts(self, file: StoredFile, check_time: Callable[[], None]) -> Iterator[memoryview]:
        """The bytes of an object in order, a few parts in flight."""
        facts = self._objects.head(file.key)
        if facts is None or facts.num_bytes != file.bytes:
            what = "is missing" if facts is None else f"has {facts.num_bytes} bytes"
            raise ObjectDamaged(f"{file.key} {what}, {file.bytes} bytes are expected")
        step, flying = self._objects.options.part_bytes, deque[Future[memoryview]]()
        with ThreadPoolExecutor(self._objects.options.parallel) as pool:
            try:
                for start in range(0, file.bytes, step):
                    stop = min(start + step, file.bytes)
                    flying.append(pool.submit(self._objects.get_range, file.key, start, stop))
                    if len(flying) >= self._objects.options.parallel:
                        check_time()
                        yield flying.popleft().result()
                while flying:
                    check_time()
                    yield flying.popleft().result()
            finally:
                for one in flying:
                    one.cancel()
