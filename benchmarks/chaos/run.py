"""Kills and restarts a writer, readers and a collector, and counts what comes of it."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.actors import CONTEXT, Actor
from benchmarks.chaos.check import faults_of_folders, faults_of_objects, faults_of_versions
from benchmarks.chaos.roles import Setting, act
from deltasync.errors import DeltaSyncError
from deltasync.store.catalogue import Run
from deltasync.store.retention import gc

ROLES = ("writer", "reader-1", "reader-2", "gc")
_LIFE_S = {"writer": 0.3, "gc": 0.8}  # at most, from when a process has begun
_READER_LIFE_S = 1.5
_CALM = 0.85  # share of the versions after which readers and the collector live on
_END_S = 90.0
_MORE = {"descriptors": 6, "threads": 6, "rss": 96 << 20}  # that a process may grow by


class _Actor(Actor):
    """A process of one role.

    Attributes:
        kill_at: When it is killed; None if that is not known yet.
        ended: Whether it has done all.
    """

    kill_at: float | None = None
    ended = False


@dataclass(slots=True)
class Seen:
    """What the processes have reported.

    Attributes:
        counts: (role without its number, event) -> how often.
        refused: Errors that readers and collectors met, by type.
        published: Versions that a writer knows to be in the store.
        newest: By role, the last version committed.
        begun: (role, life) of what has begun.
        usage: By (role, life), what was in use, in order.
        faults: What must not be.
    """

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    published: dict[int, str] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    begun: set[tuple[str, int]] = field(default_factory=set)
    usage: dict[tuple[str, int], list[dict[str, int]]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def take(self, fact: dict[str, Any]) -> None:
        """Add one line."""
        who, event = (fact["role"], fact["life"]), fact["event"]
        self.counts[f"{who[0].partition('-')[0]} {event}"] += 1
        if event == "begun":
            self.begun.add(who)
        elif event == "fault":
            self.faults.append(f"{who[0]}, life {who[1]}: {fact['why']}")
        elif event == "refused":
            self.refused[f"{who[0].partition('-')[0]} {fact['why']}"] += 1
        elif event == "published":
            self.published[fact["version"]] = fact["kind"]
        elif event == "committed":
            self.newest[who[0]] = fact["version"]
        elif event == "usage":
            self.usage.setdefault(who, []).append({name: fact[name] for name in _MORE})

    def growth(self) -> dict[str, int]:
        """By how much processes have grown, at most, in one life after its first report."""
        lives = [life for life in self.usage.values() if len(life) > 1]
        return {name: max((x[-1][name] - x[0][name] for x in lives), default=0) for name in _MORE}


class Chaos:
    """One run."""

    def __init__(self, setting: Setting, timeout_s: float) -> None:
        self.setting, self.seen, self.kills = setting, Seen(), Counter[str]()
        self._chance, self._deadline = random.Random(setting.seed), time.monotonic() + timeout_s
        self._actors = [_Actor(role) for role in ROLES]
        CONTEXT.set_forkserver_preload(["benchmarks.chaos.roles"])
        self._read_bytes = self._told = self._newest = 0
        self._patience = 1.0  # by which lives are longer

    def run(self) -> None:
        """Publish all versions, then let readers arrive, then look at what is left."""
        try:
            while not self._actors[0].ended and not self.seen.faults:
                self._turn()
            self._arrive()
        finally:
            for actor in self._actors:
                actor.kill()
            self._hear()

    def _turn(self) -> None:
        self._hear()
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not done in time, at v{max(self.seen.published, default=0)}")
        for actor in self._actors:
            self._tend(actor)
        time.sleep(0.01)

    def _tend(self, actor: _Actor) -> None:
        now, process = time.monotonic(), actor.process
        if process is None:
            self._start(actor)
        elif process.exitcode is not None:
            self._hear()
            if process.exitcode == 0 and actor.name == "writer":
                newest = max(self.seen.published, default=0)
                actor.ended = newest >= self.setting.versions
            elif process.exitcode != 0 and not self.seen.faults:
                self.seen.faults.append(f"{actor.name} ended with {process.exitcode}")
            actor.kill()
        elif actor.kill_at is None:
            if (actor.name, actor.life) in self.seen.begun:
                longest_s = _LIFE_S.get(actor.name, _READER_LIFE_S)
                actor.kill_at = now + self._patience * self._chance.uniform(0, longest_s)
        elif now > actor.kill_at and self._may_die(actor):
            actor.kill()
            self.kills[actor.name] += 1
            if actor.name == "writer":
                self._be_patient()

    def _be_patient(self) -> None:
        """Let lives be longer where writers do not come to publish anything."""
        self._hear()
        newest = max(self.seen.published, default=0)
        self._patience = max(1.0, self._patience * (1.3 if newest <= self._newest else 0.8))
        self._newest = newest

    def _may_die(self, actor: _Actor) -> bool:
        is_calm = max(self.seen.published, default=0) > _CALM * self.setting.versions
        return actor.name == "writer" or not is_calm

    def _start(self, actor: _Actor) -> None:
        actor.kill_at = None
        actor.start(act, actor.name, actor.life + 1, self.setting)

    def _arrive(self) -> None:
        """Let readers come to the newest version, and end all processes."""
        until = time.monotonic() + _END_S
        readers = [actor for actor in self._actors if actor.name.startswith("reader")]
        while not self.seen.faults:
            self._hear()
            for actor in readers:
                if actor.process is None:
                    self._start(actor)
                elif actor.process.exitcode is not None:
                    self.seen.faults.append(f"{actor.name} ended with {actor.process.exitcode}")
            if all(self.seen.newest.get(a.name) == self.setting.versions for a in readers):
                break
            if time.monotonic() > until:
                self.seen.faults.append(f"readers did not arrive: {self.seen.newest}")
            time.sleep(0.02)
        self.setting.stop.touch()
        for actor in self._actors:
            if actor.process is not None:
                actor.process.join(_END_S)
                if actor.process.exitcode != 0:
                    self.seen.faults.append(f"{actor.name} ended with {actor.process.exitcode}")

    def _hear(self) -> None:
        """Read what was reported meanwhile."""
        with suppress(FileNotFoundError), self.setting.events.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            for line in filter(None, whole.split(b"\n")):
                self.seen.take(json.loads(line))
        newest = max(self.seen.published, default=0)
        if newest >= self._told + 50:
            self._told = newest
            print(f"v{newest}, {self.kills.total()} kills", file=sys.stderr, flush=True)


def run_chaos(
    *,
    versions: int,
    seed: int,
    url: str | None = None,
    config: dict[str, str] | None = None,
    timeout_s: float = 1800.0,
) -> dict[str, Any]:
    """Do it. The report's `failures` are empty if all went well.

    Args:
        versions: How many are published.
        seed: Of weights and moments.
        url, config: An empty store; None for a temporary folder.
        timeout_s: For all of it.
    """
    with tempfile.TemporaryDirectory(prefix="deltasync-chaos-") as name:
        folder = Path(name)
        for part in ("spool", "tmp", "store"):
            (folder / part).mkdir()
        where = url or str(folder / "store")
        setting = Setting(where, config or {}, folder, versions, seed, keep_s=5.0)
        chaos, began = Chaos(setting, timeout_s), time.monotonic()
        failures: list[str] = []
        try:
            chaos.run()
            failures += chaos.seen.faults
            if not failures:
                failures += _checked(chaos)
        except (DeltaSyncError, OSError) as error:
            failures += [*chaos.seen.faults, f"{type(error).__name__}: {error}"]
        return _report(chaos, time.monotonic() - began, failures)


def _checked(chaos: Chaos) -> Iterator[str]:
    """What is wrong after the end."""
    setting, seen = chaos.setting, chaos.seen
    run = Run.open(setting.url, setting.store)
    newest = run.newest()
    if newest is None or newest.version < max(seen.published):
        yield f"v{max(seen.published)} was published, and the store has {newest}"
    for keep in (setting.versions, 3, 1):
        gc(setting.url, keep=keep, keep_s=0, options=setting.store)
        yield from faults_of_versions(setting)
        yield from faults_of_objects(setting)
    yield from faults_of_folders(setting)
    for name, more in seen.growth().items():
        if more > _MORE[name]:
            yield f"a process has {more} more {name} than when it was warm"


def _report(chaos: Chaos, seconds: float, failures: list[str]) -> dict[str, Any]:
    seen = chaos.seen
    kinds = Counter(seen.published.values())
    return {
        "versions": max(seen.published, default=0),
        "seed": chaos.setting.seed,
        "store": chaos.setting.url.partition(":")[0] if ":" in chaos.setting.url else "folder",
        "seconds": round(seconds, 1),
        "kills": dict(sorted(chaos.kills.items())),
        "known_published": len(seen.published),
        "kinds": dict(sorted(kinds.items())),
        "events": dict(sorted(seen.counts.items())),
        "refused": dict(sorted(seen.refused.items())),
        "growth": seen.growth(),
        "failures": failures,
    }
