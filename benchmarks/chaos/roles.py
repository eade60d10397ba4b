"""The processes that are killed: a writer, readers, and a collector of garbage.

Each ends when it is told so by a file, or when the process that started it is gone.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from benchmarks.chaos.actors import Diary
from benchmarks.chaos.weights import Model, Truth, fingerprint
from benchmarks.descriptors import descriptors
from deltasync import ModuleSource, ModuleTarget, ReceiverOptions, SenderOptions
from deltasync.delta.coding import Coding
from deltasync.errors import (
    ObjectDamaged,
    StoreError,
    TransportTimeout,
    VersionMissing,
    WriterConflict,
)
from deltasync.store.anchors import PublishOptions
from deltasync.store.catalogue import Run
from deltasync.store.objects import StoreOptions
from deltasync.store.receiver import StoreReceiver
from deltasync.store.retention import gc
from deltasync.store.sender import StoreSender

RUN = "chaos"
_TURN_S = 2.0
_CODINGS = tuple(coding for coding in get_args(Coding) if coding != "class")  # of links


class ChaosFailed(RuntimeError):
    """Something that must hold did not."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all processes of one run know.

    Attributes:
        url, config: The store.
        folder: For what they report, and for temporary files.
        versions: How many are published.
        seed: Of weights and moments.
        keep_s: What the collector takes for young.
    """

    url: str
    config: dict[str, str]
    folder: Path
    versions: int
    seed: int
    keep_s: float

    @property
    def store(self) -> StoreOptions:
        """How the store is reached."""
        return StoreOptions(config=self.config, timeout_s=20)

    @property
    def spool(self) -> Path:
        """Where readers keep what they fetch."""
        return self.folder / "spool"

    @property
    def events(self) -> Path:
        """Lines of JSON."""
        return self.folder / "events"

    @property
    def stop(self) -> Path:
        """Everything ends when it exists."""
        return self.folder / "stop"


def note_usage(diary: Diary) -> None:
    """What this process has open, and its memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    diary.note(
        "usage",
        descriptors=descriptors().total(),
        threads=threading.active_count(),
        rss=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def goes_on(setting: Setting, diary: Diary) -> bool:
    """Whether to work."""
    return not (setting.stop.exists() or diary.is_orphan)


def act(role: str, life: int, setting: Setting) -> None:
    """Be a process: `role` is "writer", "gc", or the name of a reader."""
    diary = Diary(setting.events, role=role, life=life)
    tempfile.tempdir = str(setting.folder / "tmp")
    diary.note("begun")
    chance = random.Random(f"{setting.seed} {role} {life}")
    play = {"writer": _write, "gc": _collect}.get(role, _read)
    try:
        play(setting, diary, chance)
    except WriterConflict as error:  # what a writer that was killed had sent, arrived late
        diary.note("conflict", why=str(error))
    except BaseException:
        diary.note("fault", why=traceback.format_exc())
        raise
    diary.note("ended")


def _write(setting: Setting, diary: Diary, chance: random.Random) -> None:
    model, truth = Model(), Truth(setting.seed)
    sender = StoreSender(
        ModuleSource(model),
        setting.url,
        options=SenderOptions(stream_id=RUN, compression=chance.choice(_CODINGS)),
        store=setting.store,
        publishing=PublishOptions(
            anchor_every=chance.choice((1, 5, 20)),
            anchor_file_bytes=chance.choice((1000, 1 << 30)),
        ),
    )
    truth.go(min(_newest(setting) + chance.choice((0, 1)), setting.versions) or 1)
    while goes_on(setting, diary):
        truth.write(model)
        try:
            stats = sender.publish()
        except ObjectDamaged as error:  # it took so long that the collector deleted its uploads
            diary.note("refused", why=type(error).__name__, text=str(error))
            continue
        truth.go(stats.version)
        if fingerprint(model) != truth.fingerprint():
            raise ChaosFailed(f"v{stats.version} was published from the weights of another one")
        diary.note("published", version=stats.version, kind=stats.kind, num_bytes=stats.delta_bytes)
        if stats.version % 10 == 0:
            note_usage(diary)
        if stats.version >= setting.versions:
            break
        truth.go(stats.version + 1)


def _newest(setting: Setting) -> int:
    """The newest version of the store; 0 if there is none."""
    try:
        newest = Run.open(setting.url, setting.store).newest()
    except VersionMissing:
        return 0
    return 0 if newest is None else newest.version


def _collect(setting: Setting, diary: Diary, chance: random.Random) -> None:
    rounds = 0
    while goes_on(setting, diary):
        try:
            stats = gc(
                setting.url,
                keep=chance.choice((1, 1, 3, 8)),
                keep_s=setting.keep_s,
                options=setting.store,
            )
            facts = {"versions": stats.versions, "unfinished": stats.unfinished}
            diary.note("collected", objects=stats.objects, **facts)
        except StoreError as error:
            diary.note("refused", why=type(error).__name__, text=str(error))
        rounds += 1
        if rounds % 10 == 0:
            note_usage(diary)
        time.sleep(chance.uniform(0.0, 0.3))


class _Engine:
    """A model that is served, and the receiver that brings versions into it."""

    def __init__(self, setting: Setting, diary: Diary, chance: random.Random) -> None:
        self.setting, self.diary, self.chance = setting, diary, chance
        self.model, self._truth, self._lock = Model(), Truth(setting.seed), threading.RLock()
        if chance.random() < 0.3:  # an engine that loads a checkpoint of the newest version
            self._truth.go(_newest(setting) or 1)
            self._truth.write(self.model)
        self._first = fingerprint(self.model)
        self.refused: Counter[str] = Counter()
        self.receiver = StoreReceiver(
            ModuleTarget(self.model),
            setting.url,
            store=setting.store,
            spool=setting.spool,
            options=ReceiverOptions(max_staged_bytes=chance.choice((None, 4096))),
        )
        self._seen, self._commits = 0, 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The engine does not serve in here; what it holds is right before and after."""
        with self._lock:
            self.check()
            yield
            self.check()

    def check(self) -> None:
        """Raise unless the model is exactly the version that the receiver says."""
        with self._lock:
            version = self.receiver.version
            if self.receiver.is_dirty:
                raise ChaosFailed(f"dirty at v{version}")
            found = fingerprint(self.model)
            if version is None:
                if found != self._first:
                    raise ChaosFailed("weights changed before the first version")
                return
            self._truth.go(version)
            if found != self._truth.fingerprint():
                raise ChaosFailed(f"what is served is not v{version}")
            if version != self._seen:
                self._note(version)

    def _note(self, version: int) -> None:
        published = Run.open(self.setting.url, self.setting.store).published(version)
        with self.receiver.hold() as held:
            total = held.live.ledger.total
        if published is not None and int(published.manifest.digest, 16) != total:
            raise ChaosFailed(f"the digest of v{version} is {total:016x}")
        self._seen, self._commits = version, self._commits + 1
        self.diary.note("committed", version=version, proved=published is not None)
        if self._commits % 10 == 0:
            note_usage(self.diary)

    def refuse(self, error: Exception) -> None:
        """Note an error that a reader may meet."""
        self.diary.note("refused", why=type(error).__name__, text=str(error)[:500])


def _read(setting: Setting, diary: Diary, chance: random.Random) -> None:
    engine = _Engine(setting, diary, chance)
    way: Callable[[_Engine], None] = _follow if chance.random() < 0.5 else _fetch
    diary.note("way", name=way.__name__)
    with engine.receiver:
        way(engine)
        engine.check()
    engine.check()


def _follow(engine: _Engine) -> None:
    with engine.receiver.follow(pause=engine.pause) as follower:
        known: Exception | None = None
        while goes_on(engine.setting, engine.diary):
            engine.check()
            follower.is_staged()  # raises what has ended the thread
            if follower.last_error is not None and follower.last_error is not known:
                known = follower.last_error
                engine.refuse(known)
            time.sleep(engine.chance.uniform(0, 0.05))


def _fetch(engine: _Engine) -> None:
    while goes_on(engine.setting, engine.diary):
        try:
            to = None
            if engine.chance.random() < 0.3:
                setting = engine.setting
                there = Run.open(setting.url, setting.store).versions()
                to = engine.chance.choice(there or [1])
            with engine.pause():
                engine.receiver.fetch(to, timeout_s=_TURN_S)
        except (StoreError, TransportTimeout) as error:
            engine.refuse(error)
        engine.check()
        time.sleep(engine.chance.uniform(0, 0.1))
    engine.receiver.fetch(timeout_s=60)
