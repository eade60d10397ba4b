"""Kills, stops and adds engines of a fleet while versions go out; checks all that they served."""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.actors import CONTEXT, Actor
from benchmarks.chaos.weights import Model, Truth
from benchmarks.descriptors import descriptors
from benchmarks.fleets.engine import HttpServer, Life, live, reserve
from deltasync import ModuleSource
from deltasync.errors import DeltaSyncError, SyncAborted
from deltasync.integrations.fleet import EngineFleet, Pauses
from deltasync.transports import collective, cuda_ipc, shared_memory
from deltasync.transports.base import SendTransport

_SLACK_S = 1.0  # of a busy machine
_REST_S = 0.05  # between two versions
_CALM_S = 90.0
LINKS: dict[str, Callable[[Path], SendTransport]] = {
    "shared_memory": lambda folder: shared_memory.Sender(folder / "socket"),
    "gloo": lambda folder: collective.Sender(),
    "cuda_ipc": lambda folder: cuda_ipc.Sender(folder / "socket", device="cuda:0"),
    "nccl": lambda folder: collective.Sender(backend="nccl", device="cuda:0"),
}
_LARGEST_GROWTH = {"descriptors": 8, "threads": 6}


class Engine(Actor):
    """One engine.

    Attributes:
        faults: When something befell it, on the monotonic clock.
        stopped_until: When a stopped process goes on; 0 if it is not stopped.
        starts_at: When a killed one is started again; 0 if it runs.
    """

    stopped_until = starts_at = 0.0

    def __init__(self, name: str, device: str, timeout_s: float) -> None:
        super().__init__(name)
        self.device, self.held, self.faults = device, reserve(), list[float]()
        self.port: int = self.held.getsockname()[1]
        self.server = HttpServer(self.port, timeout_s)

    @property
    def is_sound(self) -> bool:
        return self.process is not None and not self.stopped_until


class Misfortune(threading.Thread):
    """Kills and stops engines, and adds and removes them, until it is told to end."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(name="misfortune", daemon=True)
        self._chaos, self._chance = chaos, random.Random(f"{chaos.plan.seed} misfortune")
        self._ends, self.counts = threading.Event(), Counter[str]()
        self.error: BaseException | None = None

    def end(self) -> None:
        """Stop, and let every engine run again."""
        self._ends.set()
        self.join(60)
        for actor in self._chaos.actors:
            self._go_on(actor, at_once=True)

    def run(self) -> None:
        try:
            while not self._ends.wait(self._chance.uniform(0.02, 0.3)):
                for actor in self._chaos.actors:
                    self._go_on(actor)
                self._strike()
        except BaseException as error:
            self.error = error
            raise

    def _strike(self) -> None:
        chaos, sound = self._chaos, [a for a in self._chaos.actors if a.is_sound]
        states = chaos.fleet.servers()
        current = [a for a in sound if a.name in states and states[a.name].state == "current"]
        if len(current) <= chaos.plan.num_engines // 2:
            return
        actor = self._chance.choice(current if self._chance.random() < 0.8 else sound)
        kind, now_s = self._chance.random(), time.monotonic()
        actor.faults.append(now_s)
        if kind < 0.5:
            actor.kill()
            actor.starts_at = now_s + self._chance.uniform(0, 1)
            self.counts["kill -9"] += 1
        elif kind < 0.85:
            actor.signal(signal.SIGSTOP)
            longest_s = 2 * chaos.plan.timeout_s if self._chance.random() < 0.3 else 0.3
            actor.stopped_until = now_s + self._chance.uniform(0, longest_s)
            self.counts["SIGSTOP"] += 1
        else:
            chaos.fleet.remove(actor.name)
            chaos.join(actor)
            self.counts["leave and join"] += 1

    def _go_on(self, actor: Engine, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if actor.stopped_until and (at_once or now_s > actor.stopped_until):
            actor.signal(signal.SIGCONT)
            actor.stopped_until = 0.0
            actor.faults.append(now_s)
        if actor.starts_at and (at_once or now_s > actor.starts_at):
            actor.starts_at = 0.0
            self._chaos.start(actor)
            actor.faults.append(now_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does.

    Attributes:
        versions: Calls of `send_weights`.
        seed: Of weights, faults and moments.
        num_engines, min_engines, pauses, timeout_s: Of the fleet.
        link: How payloads travel, one of `LINKS`.
    """

    versions: int
    seed: int
    num_engines: int
    min_engines: int
    pauses: Pauses
    timeout_s: float
    link: str


class Chaos:
    """One run, with a folder for what engines write down."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan, self.failures = plan, list[str]()
        self._events, self._truth = folder / "events", Truth(plan.seed)
        self._model = Model().to(device_of(plan.link, 0))
        self._prints: dict[int, str] = {}  # of committed versions
        self._calls_s: list[float] = []
        self._outcomes, self._usage = Counter[str](), list[dict[str, int]]()
        CONTEXT.set_forkserver_preload(["benchmarks.fleets.engine"])
        self.fleet = EngineFleet(
            ModuleSource(self._model),
            LINKS[plan.link](folder),
            min_engines=plan.min_engines,
            pauses=plan.pauses,
            timeout_s=plan.timeout_s,
        )
        self.actors = [
            Engine(f"engine-{number}", device_of(plan.link, 1 + number), 2 * plan.timeout_s)
            for number in range(plan.num_engines)
        ]
        self.misfortune = Misfortune(self)

    def run(self) -> None:
        """Send all versions, let engines catch up, then close."""
        try:
            for actor in self.actors:
                self.start(actor)
                self.join(actor)
            self._await_begun()
            self._note_usage()
            self.misfortune.start()
            for _ in range(1, self.plan.versions):
                self._send()
                time.sleep(_REST_S)
            self.misfortune.end()
            self._note_usage()
        finally:
            self.fleet.close()
            self._check_states()
            for actor in self.actors:
                actor.kill()
                actor.held.close()

    def start(self, actor: Engine) -> None:
        number = actor.life + 1
        actor.start(
            live, Life(actor.name, number, actor.port, self.plan.seed, actor.device, self._events)
        )

    def join(self, actor: Engine) -> None:
        self.fleet.add(actor.server, paused=actor.server.paused, name=actor.name)

    def _await_begun(self) -> None:
        end = time.monotonic() + 60
        while sum(fact["event"] == "begun" for fact in self.facts()) < self.plan.num_engines:
            if time.monotonic() > end:
                raise TimeoutError("the engines' processes did not begin")
            time.sleep(0.05)

    def _send(self) -> None:
        """One version: the weights of the next step, whether they are taken or not."""
        self._truth.go(self._truth.version + 1)
        self._truth.write(self._model)
        began, before = time.monotonic(), self.fleet.sender.version
        try:
            stats = self.fleet.send_weights()
            self._outcomes["all" if not stats.lost else "some"] += 1
        except SyncAborted:
            self._outcomes["aborted"] += 1
        self._calls_s.append(time.monotonic() - began)
        if self.fleet.sender.version != before:
            self._prints[self.fleet.sender.version] = self._truth.fingerprint()
        if len(self._calls_s) % 50 == 0:
            done = f"{len(self._calls_s)} calls, v{self.fleet.sender.version}"
            print(done, dict(self.misfortune.counts), file=sys.stderr, flush=True)

    def _settle(self) -> None:
        """Send until all engines hold what is sent."""
        end = time.monotonic() + _CALM_S
        while time.monotonic() < end:
            with suppress(DeltaSyncError):
                self._send()
            states = self.fleet.servers()
            if all(state.state == "current" for state in states.values()):
                return
            time.sleep(0.2)
        self.failures.append(f"engines were lost for good: {states}")

    def _check_states(self) -> None:
        """Every engine serves the last version."""
        last = self._prints.get(max(self._prints, default=0))
        for actor in self.actors:
            try:
                state = actor.server.state()
            except DeltaSyncError as error:
                self.failures.append(f"{actor.name} does not answer at the end: {error}")
                continue
            if state != {"paused": False, "print": last}:
                self.failures.append(f"{actor.name} ends with {state}, not with {last}")

    def _note_usage(self) -> None:
        """What is in use when all engines have taken a payload, for which gloo connects them, and
        groups that were abandoned are gone.
        """
        self._settle()
        before = self._truth.fingerprint()
        while self._truth.fingerprint() == before:  # some versions change nothing
            self._send()
        self._usage.append(_in_use())
        end = time.monotonic() + 4 * self.plan.timeout_s
        while self._has_grown() and time.monotonic() < end:
            time.sleep(0.2)
            self._usage[-1] = _in_use()

    def facts(self) -> list[dict[str, Any]]:
        """What engines have written down."""
        if not self._events.exists():
            return []
        lines = self._events.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines if line]

    def check(self) -> Iterator[str]:
        """What is wrong in what was written down."""
        first = Truth(self.plan.seed)
        first.go(1)
        served = {first.fingerprint(), *self._prints.values()}
        for fact in self.facts():
            who = f"{fact['engine']}, life {fact['life']}"
            if fact["event"] == "serves" and fact["print"] not in served:
                yield f"{who} served weights of no version"
            if fact["event"] == "named" and fact["print"] != self._prints.get(fact["version"]):
                yield f"{who} named other weights v{fact['version']}"
        longest_s = max(self.healthy_pauses_s(), default=0.0)
        if longest_s > self.plan.timeout_s + _SLACK_S:
            yield f"a healthy engine was paused for {longest_s:.2f} s"
        for name, more in self._has_grown().items():
            yield f"the trainer has {more} more {name} than when it was warm"
        if self.misfortune.error is not None:
            yield f"misfortune: {self.misfortune.error!r}"

    def _has_grown(self) -> dict[str, int]:
        return {name: more for name, more in self.growth().items() if more > _LARGEST_GROWTH[name]}

    def growth(self) -> dict[str, int]:
        if len(self._usage) < 2:
            return {}
        return {name: self._usage[-1][name] - self._usage[0][name] for name in _LARGEST_GROWTH}

    def healthy_pauses_s(self) -> list[float]:
        """Pauses of engines that had caught up and were left alone since."""
        faults = {actor.name: actor.faults for actor in self.actors}
        named: dict[str, list[float]] = {name: [0.0] for name in faults}
        found: list[float] = []
        for fact in sorted(self.facts(), key=lambda fact: fact["at_s"]):
            name, at_s = fact["engine"], fact["at_s"]
            if fact["event"] == "paused":
                began_s, ended_s = at_s - fact["seconds"], at_s
                last = max((f for f in faults[name] if f < ended_s), default=0.0)
                if last < max(named_s for named_s in named[name] if named_s < began_s):
                    found.append(fact["seconds"])
            elif fact["event"] == "named":
                named[name].append(at_s)
        return found

    def report(self, seconds: float) -> dict[str, Any]:
        events = Counter(fact["event"] for fact in self.facts())
        calls_s = sorted(self._calls_s) or [0.0]
        return {
            "calls": len(self._calls_s),
            "versions": max(self._prints, default=0),
            "seed": self.plan.seed,
            "engines": self.plan.num_engines,
            "link": self.plan.link,
            "timeout_s": self.plan.timeout_s,
            "seconds": round(seconds, 1),
            "faults": dict(self.misfortune.counts),
            "taken_by": dict(self._outcomes),
            "events": dict(sorted(events.items())),
            "lives": sum(actor.life for actor in self.actors),
            "healthy_pauses": len(self.healthy_pauses_s()),
            "longest_healthy_pause_s": round(max(self.healthy_pauses_s(), default=0.0), 3),
            "median_call_s": round(calls_s[len(calls_s) // 2], 3),
            "longest_call_s": round(calls_s[-1], 3),
            "growth": self.growth(),
            "failures": self.failures,
        }


def device_of(link: str, process: int) -> str:
    """Where a process has its weights: the trainer is 0, engines come after it."""
    return {"nccl": f"cuda:{process}", "cuda_ipc": "cuda:0"}.get(link, "cpu")


def _in_use() -> dict[str, int]:
    return {"descriptors": descriptors().total(), "threads": threading.active_count()}


def run_chaos(plan: Plan) -> dict[str, Any]:
    """Do it. The report's `failures` are empty if all went well."""
    with tempfile.TemporaryDirectory(prefix="deltasync-fleet-") as name:
        chaos, began = Chaos(Path(name), plan), time.monotonic()
        chaos.run()
        chaos.failures += sorted(set(chaos.check()))
        return chaos.report(time.monotonic() - began)
