"""Thousands of syncs into an engine that is killed and replaced again and again.

The trainer runs here, each engine in a process of its own. The next engine is started ahead and
waits, with its imports done and its model on the device, until it is told where to connect. A
life is what one engine lives through: a full sync, deltas of every density, and SIGKILL.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, Self

import torch
from torch import nn

from benchmarks.descriptors import descriptors
from benchmarks.processes import Told, begin
from benchmarks.syncs.group import synchronize
from benchmarks.syncs.links import connect, listen
from benchmarks.syncs.plan import Plan as Where
from benchmarks.syncs.workload import bits_of, mutate
from deltasync import (
    ModuleSource,
    ModuleTarget,
    SenderOptions,
    SyncStats,
    WeightReceiver,
    WeightSender,
)
from deltasync.errors import DeltaSyncError, NoReceivers, SyncAborted, TransportTimeout

DEFAULT_GEOMETRY = "soak"
WEIGHTS = {0.0: 10, 0.0001: 25, 0.001: 25, 0.003: 20, 0.01: 13, 0.05: 4, 0.2: 2, 1.0: 1}
"""How often each share of the elements changes, of 100 syncs."""
_BUCKETS = 16  # of a dense sync, so that both of a transport's slots are full-sized at once
TIMEOUT_S = 60.0  # the first syncs may have kernels to compile
LOSS_TIMEOUT_S = 10.0  # until a killed engine is noticed
LATEST_KILL_S = 0.01
_POLL_S = 0.1  # after which an engine looks whether it was asked something
_SAMPLE_EVERY = 100
_WARM_UP = 300  # syncs of the trainer before its memory has to be flat
_MAX_GPU_GROWTH = 64 << 20
_MAX_RSS_GROWTH = 200 << 20
_MAX_MORE = 2  # descriptors or threads of the trainer: far fewer than engines are killed


FAILURES = (DeltaSyncError, RuntimeError, OSError, ValueError, TypeError, LookupError)
"""What ends a soak with a report. Out of memory is a RuntimeError."""


class SoakFailed(RuntimeError):
    """Something that must hold did not."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a soak does.

    Attributes:
        setup: Where both ends are and what they hold.
        syncs: How many syncs are begun, those that break off included.
        kill_every: In every sync that is a multiple of this, but the last, the engine is killed.
        seed: Of densities, changes and moments.
    """

    setup: Where
    syncs: int
    kill_every: int
    seed: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes in use by one end, or how many more than before.

    Attributes:
        rss: Host memory of the process.
        allocated, reserved: Device memory, as torch counts it.
        device: Device memory, as the driver counts it: of every process on that device.
    """

    rss: int
    allocated: int
    reserved: int
    device: int

    @classmethod
    def now(cls, device: torch.device) -> Self:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE")
        if device.type != "cuda":
            return cls(rss, 0, 0, 0)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return cls(rss, allocated, torch.cuda.memory_reserved(device), total - free)


def growth(samples: list[Usage]) -> dict[str, int]:
    """By how many bytes each number grew from the first sample to the last."""
    if not samples:
        return asdict(Usage(0, 0, 0, 0))
    first, last = asdict(samples[0]), asdict(samples[-1])
    return {name: last[name] - first[name] for name in last}


def fingerprint(module: nn.Module) -> str:
    """sha256 of the bytes of all parameters: nothing of deltasync's is in it."""
    hasher = hashlib.sha256()
    for bits in bits_of(module):
        hasher.update(bits.cpu().numpy().data)
    return hasher.hexdigest()


class Soak:
    """One run. What it counts is there to be read at any time, also after a failure."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self._device = plan.setup.device(0)
        self._random = random.Random(plan.seed)
        self.number = self.kills = self.restarts = self.full_syncs = self.aborted = 0
        self.compared = 0
        self.digests_equal = True
        self._lives: list[list[Usage]] = []  # of one engine each
        self._steady: list[Usage] = []  # of the trainer, once it is warm
        # At ends of lives as many processes use the devices, and as many pipes are open.
        self._ends: list[Usage] = []
        self._engine_ends: list[Usage] = []
        self._open: list[Counter[str]] = []  # descriptors and threads of the trainer
        self.delta_ms: dict[float, list[float]] = {density: [] for density in WEIGHTS}
        self.full_ms: list[float] = []
        self._module = plan.setup.model.build(self._device)
        transport, self._address = listen(plan.setup.link, self._device, folder / "weights.sock")
        num_bytes = sum(p.nbytes for p in self._module.parameters())
        options = SenderOptions(bucket_bytes=num_bytes // _BUCKETS)
        self.sender = WeightSender(ModuleSource(self._module), transport, options=options)
        self._engine = self._spare = self._new_engine()

    def run(self) -> None:
        """Raises SoakFailed, or whatever else goes wrong."""
        plan = self.plan
        self._begin_life()
        for self.number in range(1, plan.syncs + 1):
            if self.number % plan.kill_every == 0 and self.number < plan.syncs:
                self._end_life()
                self._kill()
                self._begin_life()
                self.restarts += 1
            else:
                self._sync(TIMEOUT_S)
                if self._age % min(_SAMPLE_EVERY, plan.kill_every // 2) == 0:
                    self._sample()
            if self.number % _SAMPLE_EVERY == 0:
                self._progress()
        self._end_life()
        if status := self._engine.end():
            raise SoakFailed(f"the engine ended with {status}")

    def close(self) -> None:
        self._engine.bury()
        self._spare.bury()
        self.sender.close()

    def _new_engine(self) -> Told:
        """A spare until it is told where to connect."""
        return Told("benchmarks.soak", self.plan.setup.to_json())

    def _begin_life(self) -> None:
        """Let the spare engine connect, and start another one."""
        self._engine = self._spare
        self._engine.wait_until_warm()
        self._engine.say(self._address)
        self.sender.wait_for_receivers(1, timeout_s=TIMEOUT_S)
        self._spare = self._new_engine()
        self._is_new, self._age = True, 0
        self._lives.append([])
        # Every density once at first: whatever memory syncs take is then taken.
        self._next_densities = list(WEIGHTS)
        self._random.shuffle(self._next_densities)

    def _end_life(self) -> None:
        """Compare both ends, and count what is in use."""
        self._compare()
        self._spare.wait_until_warm()
        self._sample(is_end=True)
        self._open.append(descriptors() + Counter(thread=len(os.listdir("/proc/self/task"))))

    def _change(self) -> float:
        """Change weights in place. Returns the share that was drawn, and waits for the device."""
        if self._next_densities and not self._is_new:
            density = self._next_densities.pop()
        else:
            [density] = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        if density:
            mutate(self._module, density, self.plan.seed + self.number)
        synchronize(self._device)
        return density

    def _sync(self, timeout_s: float, killer: Timer | None = None) -> None:
        """Change weights and send them, while `killer` runs.

        Raises SyncAborted or NoReceivers if nobody took them.
        """
        density, base = self._change(), self.sender.version
        if killer is not None:
            killer.start()
        began = time.perf_counter()
        stats = self.sender.send_weights(timeout_s=timeout_s)
        ms = 1000 * (time.perf_counter() - began)
        self._age += 1
        _check(stats, base, density, is_new=self._is_new)
        if not self._is_new:
            self.delta_ms[density].append(ms)
            return
        self._is_new = False
        self.full_syncs += 1
        self.full_ms.append(ms)
        self._compare()

    def _kill(self) -> None:
        """Kill the engine, by turns during a sync and before one, and expect to be told."""
        is_during = self.kills % 2 == 0
        self.kills += 1
        if is_during:
            killer = Timer(self._random.uniform(0, LATEST_KILL_S), self._engine.kill)
            is_noticed = self._is_loss_noticed(killer)
            killer.join()
            self._engine.bury()
        else:
            self._engine.bury()
            is_noticed = self._is_loss_noticed()
        # The sync may have been over before the kill; the next one cannot.
        if not is_noticed and not self._is_loss_noticed():
            raise SoakFailed("a sync went well although its only engine is dead")

    def _is_loss_noticed(self, killer: Timer | None = None) -> bool:
        """Sync once; whether it was said in time that nobody took it."""
        began = time.perf_counter()
        try:
            self._sync(LOSS_TIMEOUT_S, killer)
        except (SyncAborted, NoReceivers):
            seconds = time.perf_counter() - began
            if seconds > LOSS_TIMEOUT_S:
                raise SoakFailed(f"a dead engine was noticed after {seconds:.1f} s") from None
            self.aborted += 1
            return True
        return False

    def _compare(self) -> None:
        """Raises unless both ends hold the same bytes and version."""
        self._engine.say("digest")
        mine = fingerprint(self._module)
        theirs = self._engine.answer()
        self.compared += 1
        self.digests_equal &= theirs["digest"] == mine
        if not self.digests_equal:
            raise SoakFailed("the engine's bytes are not the trainer's")
        if theirs["version"] != self.sender.version:
            raise SoakFailed(f"the engine holds v{theirs['version']}, not v{self.sender.version}")

    def _sample(self, *, is_end: bool = False) -> None:
        """Note the memory in use at both ends."""
        self._engine.say("usage")
        theirs = Usage(**self._engine.answer())
        mine = Usage.now(self._device)
        self._lives[-1].append(theirs)
        if self.number < min(_WARM_UP, self.plan.syncs // 2):
            return
        self._steady.append(mine)
        if is_end:
            self._ends.append(mine)
            self._engine_ends.append(theirs)

    def _progress(self) -> None:
        text = f"{self.number} of {self.plan.syncs} syncs, v{self.sender.version}"
        print(f"{text}, {self.kills} kills", file=sys.stderr, flush=True)

    def report(self, seconds: float, failures: list[str]) -> dict[str, Any]:
        """All that was found out, for JSON. Adds to `failures` what has grown."""
        lives = [growth(life) for life in self._lives]
        engine = {name: max((life[name] for life in lives), default=0) for name in growth([])}
        trainer = growth(self._steady)
        trainer["device"] = growth(self._ends)["device"]
        engine["device"] = growth(self._engine_ends)["device"]
        rss = {"trainer": trainer.pop("rss"), "engine": engine.pop("rss")}
        gpu = {"trainer": trainer, "engine": engine}
        more = self._open[-1] - self._open[0] if self._open else Counter()
        failures += grown(rss, gpu, more)
        delta_ms = {density: ms for density, ms in self.delta_ms.items() if ms}
        medians = {f"{100 * density:g}": round(median(ms), 3) for density, ms in delta_ms.items()}
        return {
            "transport": self.plan.setup.transport,
            "geometry": self.plan.setup.geometry,
            "seed": self.plan.seed,
            "syncs": self.number,
            "kills": self.kills,
            "restarts": self.restarts,
            "full_syncs": self.full_syncs,
            "aborted": self.aborted,
            "versions": self.sender.version,
            "seconds": round(seconds, 1),
            "median_ms": medians,  # by percent changed
            "max_ms": round(max(map(max, delta_ms.values()), default=0.0), 3),
            "max_full_ms": round(max(self.full_ms, default=0.0), 3),
            "digests_compared": self.compared,
            "digests_equal": self.digests_equal,
            "gpu_bytes_growth": gpu,
            "rss_growth": rss,
            "descriptors_growth": dict(more),
            "failures": failures,
        }


def run_soak(plan: Plan) -> dict[str, Any]:
    """Do it. The report's `failures` are empty if all went well."""
    if plan.setup.device_type == "cuda":
        torch.cuda.set_device(plan.setup.device(0))
    failures: list[str] = []
    with TemporaryDirectory(prefix="deltasync-") as folder:
        began = time.monotonic()
        soak = Soak(plan, Path(folder))
        try:
            soak.run()
        except FAILURES as error:
            traceback.print_exc()
            failures.append(f"sync {soak.number}: {type(error).__name__}: {error}")
        finally:
            soak.close()
        return soak.report(time.monotonic() - began, failures)


def _check(stats: SyncStats, base: int, density: float, *, is_new: bool) -> None:
    """Raises unless one engine took one more version: in full if it is new, else what changed."""
    numbers = (stats.version, stats.receivers, stats.joined, stats.full_synced, stats.kind)
    expected = (base + 1, 1, 1, 1, "full") if is_new else (base + 1, 1, 0, 0, "delta")
    if numbers != expected or stats.lost:
        raise SoakFailed(f"not the sync that was expected: {stats}")
    exact = stats.numel if is_new else {0.0: 0, 1.0: stats.numel}.get(density)
    if exact is not None and stats.nnz != exact:
        raise SoakFailed(f"{stats.nnz} elements were sent, {exact} have changed")
    if exact is None and not 0 < stats.nnz < stats.numel:
        raise SoakFailed(f"{stats.nnz} elements were sent, {density} of them have changed")


def grown(
    rss: dict[str, int],
    gpu: dict[str, dict[str, int]],
    more: Counter[str],
) -> Iterator[str]:
    """What has grown by more than it may, in words; `more`: descriptors by kind, and threads."""
    for end, num_bytes in rss.items():
        if num_bytes > _MAX_RSS_GROWTH:
            yield f"host memory of the {end} grew by {num_bytes} bytes"
    for end, counts in gpu.items():
        for count, num_bytes in counts.items():
            if num_bytes > _MAX_GPU_GROWTH:
                yield f"GPU memory of the {end} ({count}) grew by {num_bytes} bytes"
    if more.total() > _MAX_MORE:
        kinds = ", ".join(f"{count} {kind}" for kind, count in more.most_common())
        yield f"the trainer has more descriptors or threads: {kinds}"


def run_engine(setup: Where) -> None:
    """The engine's process: waits to be told where to connect, then receives until stdin ends."""
    device = setup.device(1)
    answers = begin(device)
    module = setup.model.build(device)
    for bits in bits_of(module):
        bits.zero_()  # not what the trainer holds, so that only a full sync helps
    synchronize(device)
    print(json.dumps("warm"), file=answers, flush=True)
    if not (line := sys.stdin.readline()):
        return
    receiver = WeightReceiver(ModuleTarget(module), connect(json.loads(line), device))
    receiver.receive_weights(timeout_s=TIMEOUT_S)
    while (word := next_word(receiver)) is not None:
        synchronize(device)
        if word == "usage":
            answer: dict[str, Any] = asdict(Usage.now(device))
        else:
            answer = {"digest": fingerprint(module), "version": receiver.version}
        print(json.dumps(answer), file=answers, flush=True)
    receiver.close()


def next_word(receiver: WeightReceiver) -> str | None:
    """Receive until the trainer says something; None when it has nothing more to say."""
    while not select.select([sys.stdin], [], [], 0)[0]:
        with suppress(TransportTimeout):
            receiver.receive_weights(timeout_s=_POLL_S)
    line = sys.stdin.readline()
    return str(json.loads(line)) if line else None


if __name__ == "__main__":
    run_engine(Where.from_json(sys.argv[1]))
