"""One trainer, two regions with a relay each, eight receivers: processes of their own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltasync.testing.processes import Child
from tests.sync import regions

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
REGIONS, PER_REGION = ("a", "b"), 4


class Process:
    """A process that is killed at the end; its lines on stdout are JSON."""

    def __init__(self, *words: str | Path, errors: Path) -> None:
        self._errors = errors.open("ab")
        self._process = subprocess.Popen(
            list(map(str, words)),
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                file.close()

    def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)

    def tell(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")

    def hear(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended; see {self._errors.name}: {Path(self._errors.name).read_text()}"
        found: dict[str, Any] = json.loads(line)
        return found


def held(folder: Path, engine: str) -> list[dict[str, Any]]:
    """What an engine wrote down so far."""
    path = folder / f"{engine}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(folder: Path, engines: list[str], version: int, fingerprint: str) -> None:
    """Until each of these engines serves a version, bit for bit."""
    give_up = time.monotonic() + 60
    for engine in engines:
        while not (there := held(folder, engine)) or there[-1] != {
            "version": version,
            "hash": fingerprint,
        }:
            assert time.monotonic() < give_up, (engine, there[-3:], version)
            time.sleep(0.02)


class Fleet:
    """The processes. `prefix` is what a process of a place is started by.

    Attributes:
        folder: Where sockets, records and errors are.
        engines: Names of the receivers, by region.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        address: str,
        numel: int,
        prefix: dict[str, list[str]] | None = None,
    ) -> None:
        self.stack, self.folder, self.address, self.numel = stack, folder, address, numel
        self._prefix = prefix or {}
        self.engines = {r: [f"{r}{n}" for n in range(PER_REGION)] for r in REGIONS}
        self.relays: dict[str, Process] = {}
        self.children: dict[str, Child] = {}

    @property
    def all_engines(self) -> list[str]:
        return [engine for engines in self.engines.values() for engine in engines]

    def start_trainer(self) -> Process:
        words = [sys.executable, "-m", "tests.sync.regions", self.address, str(self.numel), "2"]
        trainer = self._start("trainer", *words)
        assert trainer.hear() == {"listens": True}
        return trainer

    def start_relay(self, region: str, *options: str) -> None:
        words = [sys.executable, "-m", "deltasync.cli", "relay", "--json", "--timeout", "10"]
        ends = ["--connect", self.address, "--serve", self.socket(region)]
        self.relays[region] = self._start(region, *words, *ends, "--name", region, *options)
        assert self.relays[region].hear()["event"] == "serving"

    def start_receiver(self, region: str, number: int, seed: int = 1) -> None:
        engine = self.engines[region][number]
        arguments = (self.socket(region), str(self.folder), engine, seed, self.numel)
        self.children[engine] = self.stack.enter_context(Child(regions.serve, *arguments))

    def socket(self, region: str) -> str:
        return f"shared_memory:{self.folder}/{region}.sock"

    def _start(self, place: str, *words: str) -> Process:
        errors = self.folder / f"{place}.err"
        return self.stack.enter_context(
            Process(*self._prefix.get(place, []), *words, errors=errors)
        )


def ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=30
    ).stdout


@contextmanager
def thin_links(rate: str) -> Iterator[dict[str, str]]:
    """Network namespaces for a trainer and each region, with a throttled link to each region.

    Yields the namespace by place. Skips if this system does not allow that.
    """
    names = {place: f"ds{os.getpid()}{place}" for place in ("t", *REGIONS)}
    made: list[str] = []
    try:
        try:
            for name in names.values():
                ip("netns", "add", name)
                made.append(name)
            for number, region in enumerate(REGIONS, start=1):
                link(names["t"], names[region], number, rate)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        run_in(names["t"], "sysctl", "-qw", "net.ipv4.ip_forward=1")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)


def link(trainer: str, region: str, number: int, rate: str) -> None:
    words = f"link add v{number} type veth peer name far netns {region}"
    ip("-n", trainer, *words.split())
    for name, device, host in ((trainer, f"v{number}", 1), (region, "far", 2)):
        ip("-n", name, "addr", "add", f"10.77.{number}.{host}/24", "dev", device)
        ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")
    ip("-n", trainer, "addr", "replace", "10.77.0.1/32", "dev", "lo")
    ip("-n", region, "route", "add", "10.77.0.0/16", "via", f"10.77.{number}.1")
    run_in(trainer, "tc", "qdisc", "add", "dev", f"v{number}", "root", "tbf", *rate.split())


def run_in(namespace: str, *words: str) -> str:
    return ip("netns", "exec", namespace, *words)


def received_bytes(namespace: str) -> int:
    return int(run_in(namespace, "cat", "/sys/class/net/far/statistics/rx_bytes"))


def test_each_payload_crosses_each_region_s_link_once(tmp_path: Path) -> None:
    numel = 1 << 20
    with thin_links("rate 200mbit burst 256kb latency 400ms") as names, ExitStack() as stack:
        prefix = {
            place: ["ip", "netns", "exec", names[place[0]]] for place in ("trainer", *REGIONS)
        }
        fleet = Fleet(stack, tmp_path, "gloo://10.77.0.1:29511", numel, prefix)
        trainer = fleet.start_trainer()
        for region in REGIONS:
            fleet.start_relay(region)
            for number in range(PER_REGION):
                fleet.start_receiver(region, number)
        before = {region: received_bytes(names[region]) for region in REGIONS}
        sent = 0
        for seed in range(5):
            trainer.tell(seed)
            told = trainer.hear()
            assert (told.get("receivers"), told.get("lost")) == (2, {}), told
            sent += told["bytes"]
            wait_for(tmp_path, fleet.all_engines, told["version"], told["hash"])
        assert sent > 2 * numel
        for region in REGIONS:
            crossed = received_bytes(names[region]) - before[region]
            assert sent <= crossed < 1.2 * sent, (region, crossed, sent)


def test_relays_and_receivers_that_are_killed_at_any_moment(tmp_path: Path) -> None:
    chance, numel = random.Random(0), 1 << 16
    hashes: dict[int, str] = {}
    with ExitStack() as stack:
        fleet = Fleet(stack, tmp_path, f"shared_memory:{tmp_path}/trainer.sock", numel)
        trainer = fleet.start_trainer()
        for region in REGIONS:
            fleet.start_relay(region)
            for number in range(PER_REGION):
                fleet.start_receiver(region, number)
        told: dict[str, Any] = {}
        for seed in range(12):
            trainer.tell(seed)
            time.sleep(chance.random() * 0.1)
            if seed % 3 == 1:
                region = chance.choice(REGIONS)
                fleet.relays[region].kill()
                fleet.start_relay(region, "--memory", str(tmp_path / f"{region}.model"))
            if seed % 3 == 2:
                region, number = chance.choice(REGIONS), chance.randrange(PER_REGION)
                fleet.children[fleet.engines[region][number]].kill()
                fleet.start_receiver(region, number)
            told = trainer.hear()
            if "version" in told:
                hashes[told["version"]] = told["hash"]
        trainer.tell(99)  # also after a last version of which nobody was left
        told = trainer.hear()
        hashes[told["version"]] = told["hash"]
        wait_for(tmp_path, fleet.all_engines, told["version"], told["hash"])
        for engine in fleet.all_engines:
            wrong = [
                one
                for one in held(tmp_path, engine)
                if one.get("version") in hashes and one["hash"] != hashes[one["version"]]
            ]
            assert not wrong, engine


ABOVE = ("layout", "welcome", "begin", "bucket", "prepare", "prepared", "commit", "committed")
BELOW = ("begin", "bucket", "prepare", "commit", "finish")


@pytest.mark.parametrize(
    ("phase", "dies_above"), [(p, True) for p in ABOVE] + [(p, False) for p in BELOW]
)
def test_a_relay_that_dies_at_a_phase_and_is_restarted(
    tmp_path: Path, phase: str, dies_above: bool
) -> None:
    """What its receiver serves is always a version of the trainer, bit for bit."""
    numel, hashes = 1 << 14, dict[int, str]()
    above, below = (f"shared_memory:{tmp_path}/{name}.sock" for name in ("above", "below"))
    memory = str(tmp_path / "model")

    def next_version(seed: int) -> dict[str, Any]:
        trainer.tell(seed)
        told = trainer.hear()
        if "version" in told:
            hashes[told["version"]] = told["hash"]
        return told

    with ExitStack() as stack:
        words = [sys.executable, "-m", "tests.sync.regions", above, str(numel), "1"]
        trainer = stack.enter_context(Process(*words, errors=tmp_path / "trainer.err"))
        trainer.hear()
        dying = stack.enter_context(Child(regions.relay, above, below, phase, memory, dies_above))
        stack.enter_context(Child(regions.serve, below, str(tmp_path), "engine", 1, numel))
        give_up, seed = time.monotonic() + 60, 0
        while dying.is_alive:
            assert time.monotonic() < give_up, "it has not come to that phase"
            next_version(seed)
            seed += 1
            time.sleep(0.3)
        stack.enter_context(Child(regions.relay, above, below, "", memory, dies_above))
        while "version" not in (told := next_version(seed)):
            assert time.monotonic() < give_up, told
            seed += 1
        wait_for(tmp_path, ["engine"], told["version"], told["hash"])
        for one in held(tmp_path, "engine"):
            known = [h for version, h in hashes.items() if version == one.get("version")]
            assert "version" not in one or not known or one["hash"] in known
