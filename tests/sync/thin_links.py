"""Processes, and network namespaces with a slow link between them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


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


@contextmanager
def thin_links(rate: str) -> Iterator[dict[str, str]]:
    """Network namespaces for a trainer, "t", and an engine, "e", with a throttled link between.

    Yields the namespace by place. Skips if this system does not allow that.
    """
    names = {place: f"ds{os.getpid()}{place}" for place in "te"}
    made: list[str] = []
    try:
        try:
            for name in names.values():
                _ip("netns", "add", name)
                made.append(name)
            _link(names["t"], names["e"], rate)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)


def _link(trainer: str, engine: str, rate: str) -> None:
    words = f"link add near type veth peer name far netns {engine}"
    _ip("-n", trainer, *words.split())
    for name, device, host in ((trainer, "near", 1), (engine, "far", 2)):
        _ip("-n", name, "addr", "add", f"10.77.0.{host}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "link", "set", "lo", "up")
    words = f"netns exec {trainer} tc qdisc add dev near root tbf {rate}"
    _ip(*words.split())


def _ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=30
    ).stdout
