"""A process that speaks JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

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
