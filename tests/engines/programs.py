"""Engines' servers, and other programs that have processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any, Self

from deltasync.errors import EngineFailed, PeerLost
from deltasync.integrations.http import Http
from tests.engines.environment import ROOT

TIMEOUT_S = 580  # on a busy machine
_START_TIMEOUT_S = 570


class Program:
    """A process that has processes of its own: all of them end with the `with` block."""

    def __init__(self, *command: object) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *map(str, command)],
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """What it has printed so far."""
        self._output.seek(0)
        return self._output.read()

    def wait(self, timeout_s: float = TIMEOUT_S) -> str:
        """What it prints until it has ended well."""
        assert self._process.wait(timeout_s) == 0, self.output()
        return self.output()


def wait_until_up(server: Http, program: Program) -> None:
    """Until it answers, which may be that it is not ready."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            server.get("health")
            return
        except EngineFailed as error:
            if error.status == 503:
                return
            raise
        except PeerLost:
            is_hopeless = not program.is_running() or time.monotonic() > deadline
            assert not is_hopeless, program.output()
            time.sleep(0.5)


def objects(text: str, beginning: str) -> list[dict[str, Any]]:
    """JSON objects of lines that begin so; what others print may stand behind them."""
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(line)[0] for line in text.splitlines() if line.startswith(beginning)]
