"""A live trainer and its engine, attacked for long by processes that do not belong to them.

The strangers do what anybody can who reaches the address: connect and say nothing, send half a
message, bytes of any kind, greetings of engines that never become whole; and connect again, as
often as they can. They never greet as a whole engine: without a secret that is what the trainer
serves. Each is a process of its own, and attacks this machine alone.
"""

from __future__ import annotations

import ipaddress
import os
import random
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import nn

from benchmarks import processes
from benchmarks.soak import Usage, fingerprint
from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.errors import DeltaSyncError, TransportTimeout
from deltasync.transports import collective, shared_memory
from deltasync.transports.control.connection import Kind
from deltasync.wire.frame import encode
from deltasync.wire.messages import Hello

SECRET = b"only of the trainer and its engine"
_TIMEOUT_S, _PATIENCE_S = 20.0, 120.0
_NUM_STRANGERS = 2
_MAX_DESCRIPTORS = 512
_SPARE = 64
_MAX_CONNECTIONS = 150  # of one stranger, at a time
_HEADER = struct.Struct("<2sBxI")
# What calls and memory may take: with strangers whose greetings are read, and with others.
_MAX_CALL_S = {True: 8.0, False: 3.0}
_MAX_RSS_BYTES = {True: 1536 << 20, False: 256 << 20}


@dataclass(frozen=True, slots=True)
class Attack:
    """One run: for how long, over which link ("collective" or "local"), with a secret or not."""

    seconds: float
    link: str
    has_secret: bool
    seed: int

    @property
    def is_heard(self) -> bool:
        """Whether strangers come as far as a greeting."""
        return not self.has_secret


def run(attack: Attack) -> dict[str, object]:
    """Attack a trainer. `failures` in the result says what did not hold; empty if all did."""
    torch.manual_seed(attack.seed)
    module = nn.Linear(256, 256)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(_few_descriptors())
        transport, address = _listen(attack, Path(folder))
        sender = WeightSender(ModuleSource(module), transport)
        stack.callback(sender.close)
        engine = stack.enter_context(_process("engine", address, _secret_of(attack)))
        sender.wait_for_receivers(1, timeout_s=_PATIENCE_S)
        sender.send_weights(timeout_s=_TIMEOUT_S)
        with ExitStack() as strangers:
            for number in range(_NUM_STRANGERS):
                seed = str(attack.seed * 100 + number)
                words = ("stranger", address, seed, str(attack.seconds))
                _wait_until_ready(strangers.enter_context(_process(*words)))
            found = _train(attack, module, sender)
        sender.close()
        told, _ = engine.communicate(timeout=_PATIENCE_S)
        if told.split()[-1:] != [fingerprint(module.bfloat16())]:
            found["failures"] = [*_failures(found), "the engine's weights are not the trainer's"]
    return found


def _train(attack: Attack, module: nn.Linear, sender: WeightSender) -> dict[str, object]:
    """Sync until the time is over, and measure every call."""
    before, took = Usage.now(torch.device("cpu")).rss, dict[str, list[float]](sync=[], wait=[])
    most_rss = most_descriptors = 0
    failures: Counter[str] = Counter()
    end = time.monotonic() + attack.seconds
    while time.monotonic() < end:
        with torch.no_grad():
            module.weight[random.randrange(256)] += 0.01
        with _measured(took["sync"]):
            try:
                stats = sender.send_weights(timeout_s=_TIMEOUT_S)
                failures.update(f"lost {who}: {why}" for who, why in stats.lost.items())
            except DeltaSyncError as error:
                failures[f"{type(error).__name__}: {error}"[:200]] += 1
        with _measured(took["wait"]), suppress(TransportTimeout):
            sender.wait_for_receivers(1 << 16, timeout_s=0.05)
        most_rss = max(most_rss, Usage.now(torch.device("cpu")).rss - before)
        most_descriptors = max(most_descriptors, len(os.listdir("/proc/self/fd")))
    innocent = {text: n for text, n in failures.items() if "stranger" not in text}
    found: dict[str, object] = {
        "link": attack.link,
        "secret": attack.has_secret,
        "seconds": attack.seconds,
        "syncs": len(took["sync"]),
        "median_ms": round(1e3 * median(took["sync"]), 3),
        "slowest_ms": round(1e3 * max(took["sync"]), 3),
        "slowest_wait_ms": round(1e3 * max(took["wait"]), 3),
        "rss_growth": most_rss,
        "descriptors": most_descriptors,
    }
    return found | {"failures": [*innocent, *_exceeded(attack, found)]}


def _exceeded(attack: Attack, found: dict[str, object]) -> Iterator[str]:
    """The bounds that did not hold."""
    bounds = {
        "slowest_ms": 1e3 * _MAX_CALL_S[attack.is_heard],
        "slowest_wait_ms": 1e3 * _MAX_CALL_S[attack.is_heard],
        "rss_growth": _MAX_RSS_BYTES[attack.is_heard],
        "descriptors": _MAX_DESCRIPTORS - _SPARE,
    }
    for name, most in bounds.items():
        value = found[name]
        assert isinstance(value, int | float)
        if value > most:
            yield f"{name} is {value}, over {most:.0f}"


def _failures(found: dict[str, object]) -> list[str]:
    failures = found["failures"]
    assert isinstance(failures, list)
    return failures


@contextmanager
def _measured(took: list[float]) -> Iterator[None]:
    began = time.monotonic()
    yield
    took.append(time.monotonic() - began)


@contextmanager
def _few_descriptors() -> Iterator[None]:
    """So few that the strangers can take them all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_DESCRIPTORS, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """This module as another process, which is killed at the end."""
    process = processes.start("benchmarks.strangers", *words)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Return when it has begun, which takes imports."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], _PATIENCE_S)[0]:
        raise TransportTimeout(f"a stranger has not begun in {_PATIENCE_S} s")
    process.stdout.readline()


def _secret_of(attack: Attack) -> str:
    return SECRET.decode() if attack.has_secret else ""


def _listen(attack: Attack, folder: Path) -> tuple[collective.Sender | shared_memory.Sender, str]:
    """The trainer's end, and its address: a port of this machine, or a path."""
    if attack.link == "local":
        local = shared_memory.Sender(folder / "weights")
        return local, str(local.path)
    network = collective.Sender(secret=SECRET if attack.has_secret else None)
    return network, "{}:{}".format(*network.address)


# The engine


def serve(address: str, secret: str) -> None:
    """Take syncs until the trainer has gone; print a fingerprint of the weights."""
    module = nn.Linear(256, 256).bfloat16()
    host, _, port = address.rpartition(":")
    link = (
        collective.Receiver(host, int(port), secret=secret.encode() or None)
        if host
        else shared_memory.Receiver(address)
    )
    with WeightReceiver(ModuleTarget(module), link, engine="honest") as receiver:
        with suppress(DeltaSyncError):
            while True:
                receiver.receive_weights(timeout_s=600)
        print(fingerprint(module), flush=True)


# Strangers


class Stranger:
    """Attacks one address of this machine until its time is over."""

    def __init__(self, address: str, seed: int, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        if host and not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"{address} is not of this machine")
        self._address: tuple[str, int] | str = (host, int(port)) if host else address
        self._random = random.Random(seed)
        self._end = time.monotonic() + seconds
        self._held: list[socket.socket] = []

    def attack(self) -> None:
        """One way after another, a second each."""
        print("ready", flush=True)
        ways: list[Callable[[], None]] = [
            self._silence,
            self._half_headers,
            self._half_greetings,
            self._half_engines,
            self._noise,
            self._trickle,
            self._chatter,
        ]
        while time.monotonic() < self._end:
            way, until = self._random.choice(ways), time.monotonic() + 1.0
            while time.monotonic() < min(until, self._end):
                with suppress(OSError):
                    way()
            while self._held and self._random.random() < 0.9:
                self._held.pop(self._random.randrange(len(self._held))).close()

    def _connect(self) -> socket.socket:
        family = socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(0.2)
        sock.connect(self._address)
        if len(self._held) >= _MAX_CONNECTIONS:
            self._held.pop(0).close()
        self._held.append(sock)
        return sock

    def _silence(self) -> None:
        self._connect()
        time.sleep(0.002)

    def _half_headers(self) -> None:
        self._connect().sendall(_message(Kind.GREETING, bytes(100))[: self._random.randrange(1, 9)])

    def _half_greetings(self) -> None:
        num_bytes = self._random.choice([1 << 10, 1 << 20, (16 << 20) - 1])
        self._connect().sendall(_HEADER.pack(b"dS", Kind.GREETING, 16 << 20) + bytes(num_bytes))

    def _half_engines(self) -> None:
        count = self._random.choice([0, 100, 10_000])
        hello = Hello(
            engine=f"stranger-{self._random.randrange(1 << 30)}",
            rank=0,
            world=2,
            format_versions=(1,),
            stream_id=None,
            version=None,
            parameters=tuple(((f"p{n}",), (), 1) for n in range(count)),
            connection=None,
            lanes=0,
        )
        self._connect().sendall(_message(Kind.GREETING, encode(hello)))

    def _noise(self) -> None:
        self._connect().sendall(self._random.randbytes(self._random.randrange(1, 1 << 16)))

    def _trickle(self) -> None:
        sock = self._connect()
        for byte in _message(Kind.GREETING, bytes(20)):
            sock.sendall(bytes([byte]))
            time.sleep(0.01)

    def _chatter(self) -> None:
        sock = self._connect()
        sock.sendall(_message(Kind.GREETING, b"no hello"))
        for _ in range(100):
            sock.sendall(_message(Kind.REPLY, bytes(1 << 16)))


def _message(kind: Kind, data: bytes) -> bytes:
    return _HEADER.pack(b"dS", kind, len(data)) + data


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "engine":
        serve(*sys.argv[2:4])
    else:
        Stranger(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])).attack()
