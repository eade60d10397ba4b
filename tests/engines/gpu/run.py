"""All cases on the GPUs of this machine, some side by side.

    python -m tests.engines.gpu.run [--out FILE] [--at-once N] [--limit SECONDS] [NAME ...]

Appends a JSON line for each, of which `python -m tests.engines.support` makes a table. The exit
code is 1 if one is wrong or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.record import Environment
from tests.engines.environment import ROOT
from tests.engines.gpu.cases import CASES

_SETTINGS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": str(int(find_spec("flashinfer") is not None)),
}
_END_S = 5.0
_SAID = 12000  # of what a failed case has printed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.gpu.run")
    parser.add_argument("names", nargs="*", help="if none, all that fit the GPUs and engines here")
    parser.add_argument("--out", type=Path, default=Path("gpu-engines.jsonl"))
    parser.add_argument("--at-once", type=int, default=8, help="cases that run side by side")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each")
    chosen = parser.parse_args()
    count = max(1, torch.cuda.device_count())
    names = chosen.names or [
        name for name, case in CASES.items() if case.workers <= count and find_spec(case.engine)
    ]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    environment = asdict(Environment.here())
    began, lock, bad = time.monotonic(), Lock(), 0
    with ThreadPoolExecutor(chosen.at_once) as pool, chosen.out.open("a", encoding="utf-8") as file:
        for row in pool.map(lambda name: tried(name, chosen.limit), names):
            bad += row["outcome"] in ("WRONG", "failed")
            with lock:
                file.write(json.dumps(row | {"environment": environment}) + "\n")
                file.flush()
            print(f"{time.monotonic() - began:6.0f} s  {row['name']}: {row['outcome']}", flush=True)  # noqa: T201
    return int(bad > 0)


def tried(name: str, limit_s: float) -> dict[str, Any]:
    """In a process group of its own, which is ended with all that it has started."""
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.engines.gpu.follow", name, str(folder)],
        cwd=ROOT,
        env=os.environ | _SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        printed = ended(process)
        printed += f"\nended after {limit_s:.0f} s"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    told = [line for line in printed.splitlines() if line.startswith('{"name"')]
    row: dict[str, Any] = {"name": name, "outcome": "failed", "printed": printed[-_SAID:]}
    if process.returncode == 0 and told:
        row = json.loads(told[-1])
    return row | {"took_s": round(time.monotonic() - began, 1)}


def ended(process: subprocess.Popen[str]) -> str:
    """What a process has printed that is ended with its group."""
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):  # it ends servers that have groups of their own
        process.communicate(timeout=_END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]


if __name__ == "__main__":
    sys.exit(main())
