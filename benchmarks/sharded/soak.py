"""Syncs from the ranks of a trainer to the ranks of an engine, some of which are killed.

Each rank is a process. Those that are killed are replaced; the others connect again with the
weights that they have. Weights are compared outside the library, by way of a file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections import Counter, defaultdict
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.descriptors import descriptors
from benchmarks.fused import Fused
from benchmarks.gpu.engine import FAILURES, begin_engine, free_memory, synchronize
from benchmarks.gpu.links import listen
from benchmarks.sharded.ends import (
    change_shards,
    holds,
    part_of,
    receiver_of,
    sender_of,
    sharded,
    shell_of,
    wholes,
)
from benchmarks.sharded.plan import ShardedPlan
from benchmarks.soak import (
    LATEST_KILL_S,
    LOSS_TIMEOUT_S,
    TIMEOUT_S,
    WEIGHTS,
    SoakFailed,
    Told,
    Usage,
    grown,
    growth,
    next_word,
)
from deltasync import WeightSender
from deltasync.errors import NoReceivers, PeerLost, SyncAborted

_MODULE = "benchmarks.sharded.soak"
_PROGRESS_EVERY = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """What a soak does.

    Attributes:
        ranks: Of the trainer and of the engine, and where they are.
        syncs: How many syncs are begun, those that break off included.
        kill_every: In every sync that is a multiple of this, but the last, engine ranks are killed.
        seed: Of densities, changes, ranks and moments.
    """

    ranks: ShardedPlan
    syncs: int
    kill_every: int
    seed: int


class Soak:
    """One run. What it counts is there to be read at any time, also after a failure."""

    def __init__(self, plan: Plan, folder: Path, stack: ExitStack) -> None:
        self.plan, self._folder, self._stack = plan, folder, stack
        self._random = random.Random(plan.seed)
        self.number = self.kills = self.aborted = self.compared = self.version = 0
        self.survivors = 0  # ranks that connected again
        self.ms: dict[float, list[float]] = defaultdict(list)
        self._usage: list[list[Usage]] = []  # at the ends of lives, of each trainer rank
        self._open: list[list[Counter[str]]] = []
        self._next_densities: list[float] = []
        self._trainers = [self._start("trainer", n) for n in range(plan.ranks.trainers)]
        self._addresses = [trainer.answer() for trainer in self._trainers]
        numbers = range(plan.ranks.engines)
        self._engines = {number: self._start("engine", number) for number in numbers}
        self._spares = {number: self._start("engine", number) for number in numbers}

    def run(self) -> None:
        """Raises SoakFailed, or whatever else goes wrong."""
        plan = self.plan
        for engine in self._engines.values():
            self._connect(engine)
        self._join()
        for self.number in range(1, plan.syncs + 1):
            if self.number % plan.kill_every == 0 and self.number < plan.syncs:
                self._end_life()
                self._lose()
            else:
                self._sync()
            if self.number % _PROGRESS_EVERY == 0:
                text = f"{self.number} of {plan.syncs} syncs, v{self.version}, {self.kills} kills"
                print(text, file=sys.stderr, flush=True)
        self._end_life()
        ended = [engine.end() for engine in self._engines.values()]
        for trainer in self._trainers:  # they wait for each other
            trainer.let_go()
        ended += [trainer.end() for trainer in self._trainers]
        if any(ended):
            raise SoakFailed(f"ranks ended with {ended}")

    def _start(self, end: str, number: int) -> Told:
        words = (self.plan.ranks.to_json(), end, str(number), str(self._folder))
        told = Told(_MODULE, *words)
        self._stack.callback(told.bury)
        return told

    def _connect(self, engine: Told) -> None:
        engine.wait_until_warm()
        engine.say(self._addresses)

    def _join(self) -> None:
        """Wait until all engine ranks are there."""
        self._trainers[0].say({"do": "wait", "count": self.plan.ranks.engines})
        self._trainers[0].answer(2 * TIMEOUT_S)
        self._next_densities = list(WEIGHTS)
        self._random.shuffle(self._next_densities)

    def _send(self, timeout_s: float, victims: tuple[int, ...] = ()) -> dict[str, Any]:
        """One call of all trainer ranks, in which `victims` are killed. What they say alike."""
        chances = list(WEIGHTS.values())
        [density] = self._random.choices(list(WEIGHTS), chances)
        if self._next_densities and not victims:
            density = self._next_densities.pop()
        seed = self.plan.seed + self.number
        killer = Timer(self._random.uniform(0, LATEST_KILL_S), self._kill, [victims])
        killer.start()
        for trainer in self._trainers:
            say = {"do": "send", "density": density, "seed": seed, "timeout_s": timeout_s}
            trainer.say(say)
        answers = [trainer.answer(2 * TIMEOUT_S) for trainer in self._trainers]
        killer.join()
        seconds = answers[0].pop("seconds")
        for answer in answers[1:]:
            answer.pop("seconds")
        if any(answer != answers[0] for answer in answers):
            raise SoakFailed(f"trainer ranks disagree: {answers}")
        if seconds > timeout_s + 1:
            raise SoakFailed(f"a call with a timeout of {timeout_s} s took {seconds:.1f} s")
        if not victims and not answers[0]["error"]:
            self.ms[density].append(1000 * seconds)
        return dict(answers[0])

    def _kill(self, victims: tuple[int, ...]) -> None:
        for number in victims:
            self._engines[number].kill()

    def _sync(self) -> None:
        said = self._send(TIMEOUT_S)
        if said["error"] or said["lost"] or said["receivers"] != self.plan.ranks.engines:
            raise SoakFailed(f"not the sync that was expected: {said}")
        if said["version"] != self.version + 1:
            raise SoakFailed(f"v{said['version']} follows v{self.version}")
        self.version = said["version"]

    def _lose(self) -> None:
        """Kill some ranks of the engine in a sync, expect to be told, and replace them."""
        numbers = list(self._engines)
        victims = tuple(self._random.sample(numbers, self._random.randint(1, len(numbers))))
        self.kills += len(victims)
        said = self._send(LOSS_TIMEOUT_S, victims)
        self.version = said["version"]
        for number in victims:
            self._engines[number].bury()
        self.aborted += bool(said["error"])
        if not said["error"] and not self._send(LOSS_TIMEOUT_S)["error"]:
            raise SoakFailed("a sync went well although ranks of its only engine are dead")
        for number in victims:
            self._engines[number] = self._spares[number]
            self._connect(self._engines[number])
            self._spares[number] = self._start("engine", number)
        self._join()
        self._sync()
        self.survivors += len(numbers) - len(victims)
        self._compare()

    def _end_life(self) -> None:
        """Compare both ends, and count what is in use."""
        self._compare()
        for spare in self._spares.values():
            spare.wait_until_warm()
        usage, found = [], []
        for trainer in self._trainers:
            trainer.say({"do": "usage"})
            answer = trainer.answer()
            usage.append(Usage(**answer["usage"]))
            found.append(Counter(answer["open"]))
        self._usage.append(usage)
        self._open.append(found)

    def _compare(self) -> None:
        """Raises unless each engine rank holds its part of the trainer's bytes and version."""
        for trainer in self._trainers:
            trainer.say({"do": "write"})
        for trainer in self._trainers:
            trainer.answer()
        for engine in self._engines.values():
            engine.say("compare")
        self.compared += 1
        for number, engine in self._engines.items():
            found = engine.answer()
            if found != {"wrong": [], "version": self.version}:
                raise SoakFailed(f"engine rank {number} has not v{self.version}: {found}")

    def report(self, seconds: float, failures: list[str]) -> dict[str, Any]:
        """All that was found out, for JSON. Adds to `failures` what has grown."""
        of_ranks = [growth(list(samples)) for samples in zip(*self._usage, strict=True)]
        most = {name: max((one[name] for one in of_ranks), default=0) for name in growth([])}
        rss, gpu = {"trainer": most.pop("rss")}, {"trainer": most}
        more = Counter[str]()
        if self._open:
            for before, after in zip(self._open[0], self._open[-1], strict=True):
                more |= after - before
        failures += grown(rss, gpu, more)
        return {
            "transport": self.plan.ranks.where,
            "geometry": self.plan.ranks.geometry,
            "seed": self.plan.seed,
            "syncs": self.number,
            "kills": self.kills,
            "survivors": self.survivors,
            "aborted": self.aborted,
            "versions": self.version,
            "seconds": round(seconds, 1),
            "median_ms": {f"{100 * d:g}": round(median(self.ms[d]), 3) for d in sorted(self.ms)},
            "compared": self.compared,
            "gpu_bytes_growth": gpu,
            "rss_growth": rss,
            "descriptors_growth": dict(more),
            "failures": failures,
        }


def run_soak(plan: Plan) -> dict[str, Any]:
    """Do it. The report's `failures` are empty if all went well."""
    failures: list[str] = []
    with TemporaryDirectory(prefix="deltasync-") as folder, ExitStack() as stack:
        began = time.monotonic()
        soak = Soak(plan, Path(folder), stack)
        try:
            soak.run()
        except FAILURES as error:
            traceback.print_exc()
            failures.append(f"sync {soak.number}: {type(error).__name__}: {error}")
        return soak.report(time.monotonic() - began, failures)


class _Trainer:
    """A rank of the trainer, which does as it is told."""

    def __init__(self, plan: ShardedPlan, rank: int, folder: Path) -> None:
        self._device, self._folder, self._rank = plan.device(rank), folder, rank
        self._answers = begin_engine(self._device)
        backend = "gloo" if plan.device_type == "cpu" else "nccl"
        init = f"file://{folder / 'trainers'}"
        dist.init_process_group(backend, init_method=init, rank=rank, world_size=plan.trainers)
        self._module = sharded(plan, self._device, dist.group.WORLD)
        self._shards = shell_of(self._module)
        self._replicas = shell_of(self._module, replicated=True)
        lane, address = listen(plan.link, self._device, folder / f"lane{rank}")
        self.say(address)
        self.sender = sender_of(plan, rank, self._module, lane, folder / "calls")

    def say(self, answer: object) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def on_wait(self, count: int) -> None:
        assert isinstance(self.sender, WeightSender)
        self.sender.wait_for_receivers(count, timeout_s=TIMEOUT_S)

    def on_send(self, density: float, seed: int, timeout_s: float) -> dict[str, Any]:
        if density:
            change_shards(self._shards, self._replicas, density, seed, self._rank)
        synchronize(self._device)
        dist.barrier()
        began, receivers, lost, error = time.perf_counter(), 0, list[str](), ""
        try:
            stats = self.sender.send_weights(timeout_s=timeout_s)
            receivers, lost = stats.receivers, list(stats.lost)
        except (SyncAborted, NoReceivers) as found:
            error = type(found).__name__
        seconds = time.perf_counter() - began
        state = {"version": self.sender.version, "receivers": receivers, "lost": lost}
        return {**state, "error": error, "seconds": seconds}

    def on_write(self) -> None:
        """Write all weights to a file, of which engine ranks read their parts."""
        with (self._folder / f"weights{self._rank}").open("wb") as file:
            for whole in wholes(self._module):
                if self._rank == 0:
                    file.write(whole.view(torch.int16).cpu().numpy().data)
        del whole
        free_memory(self._device)
        dist.barrier()

    def on_usage(self) -> dict[str, Any]:
        threads = Counter(thread=len(os.listdir("/proc/self/task")))
        return {"usage": asdict(Usage.now(self._device)), "open": descriptors() + threads}


def _run_trainer(plan: ShardedPlan, rank: int, folder: Path) -> None:
    trainer = _Trainer(plan, rank, folder)
    with closing(trainer.sender):
        for line in sys.stdin:
            word = json.loads(line)
            trainer.say(getattr(trainer, f"on_{word.pop('do')}")(**word))
    dist.destroy_process_group()


def _run_engine(plan: ShardedPlan, number: int, folder: Path) -> None:
    device = plan.device(plan.trainers + number)
    answers = begin_engine(device)
    model = part_of(plan, number, device)
    synchronize(device)
    print(json.dumps("warm"), file=answers, flush=True)
    if not (line := sys.stdin.readline()):
        return
    make = partial(receiver_of, plan, number, model, json.loads(line), device)
    receiver = make()
    while True:
        try:
            if next_word(receiver) is None:
                break
        except SyncAborted:
            continue
        except PeerLost:  # with another rank the whole engine is gone: connect again
            receiver.close()
            receiver = make(half_written=receiver.is_half_written)
            continue
        synchronize(device)
        found = {"wrong": _wrong_in(model, plan, folder / "weights0"), "version": receiver.version}
        free_memory(device)
        print(json.dumps(found), file=answers, flush=True)
    receiver.close()


def _wrong_in(model: Fused, plan: ShardedPlan, path: Path) -> list[str]:
    """Names of tensors that are not as in a file of all of them."""
    numel = plan.model.numel
    line, begin, wrong = torch.from_file(str(path), size=numel, dtype=torch.bfloat16), 0, []
    for name, shape in plan.model.shapes().items():
        end = begin + prod(shape)
        if not holds(model, name, line[begin:end].view(shape)):
            wrong.append(name)
        begin = end
    return wrong


if __name__ == "__main__":
    given = ShardedPlan.from_json(sys.argv[1])
    run = {"trainer": _run_trainer, "engine": _run_engine}[sys.argv[2]]
    run(given, int(sys.argv[3]), Path(sys.argv[4]))
