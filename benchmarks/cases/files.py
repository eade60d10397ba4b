"""Two checkpoint files: `deltasync diff` against numpy reading and comparing them; its memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import nn

from benchmarks.cases.kernels import size_of
from benchmarks.record import MEMORY, SPEED_UP, Result, compared
from benchmarks.timing import interleave
from benchmarks.workload import Flip, Scale, decoder
from deltasync.files.checkpoint import Checkpoint
from deltasync.files.comparing import compare_checkpoints

BLOCK_BYTES = 1 << 20  # what numpy compares at once: neither smaller nor larger ones are faster
BOUND_BYTES = 3 << 29  # 1.5 GiB
GOAL = 0.6
_WATCHED = """
import atexit, pathlib, re, sys
from deltasync.cli import main
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: print(*re.findall("VmHWM.*", status.read_text()), file=sys.stderr))
main()
"""


def files(scale: Scale) -> Iterator[Result]:
    """Page cache warm; without what encodings take, and in the two threads that the command has."""
    module = decoder(*scale.files)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old = _saved(module, folder / "old.safetensors")
        for density in scale.file_densities:
            flip = Flip(module, density)
            flip.apply()
            new = _saved(module, folder / "new.safetensors")
            flip.apply()
            size = size_of(module, flip, density)
            yield (timed := _timed(old, new, scale.rounds, size))
            yield _resident(old, new, timed)


def _timed(old: Path, new: Path, rounds: int, size: dict[str, object]) -> Result:
    samples = interleave(
        {"diff": lambda: _diff(old, new), "numpy": lambda: _numpy(old, new)}, rounds=rounds
    )
    return compared(
        case="files",
        **size,
        samples=samples["diff"],
        baseline="np.memmap of both files, np.array_equal by MiB",
        baseline_samples=samples["numpy"],
        ratio_is=SPEED_UP,
        goal=GOAL,
        bytes=old.stat().st_size + new.stat().st_size,
    )


def _diff(old: Path, new: Path) -> None:
    compare_checkpoints(Checkpoint(old), Checkpoint(new), encodings=False)


def _numpy(old: Path, new: Path) -> int:
    before, after = (np.memmap(path, np.uint8, "r") for path in (old, new))
    equal = 0
    for begin in range(0, len(before), BLOCK_BYTES):
        block = slice(begin, begin + BLOCK_BYTES)
        equal += np.array_equal(before[block], after[block])
    return equal


def _resident(old: Path, new: Path, timed: Result) -> Result:
    """The most that the command itself had resident, imports and all.

    As the process says at its end: what `wait4` tells begins with the memory of who started it.
    """
    command = [sys.executable, "-c", _WATCHED, "diff", str(old), str(new), "--json"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
    num_bytes = 1024 * int(done.stderr.split()[-2])
    return replace(
        timed,
        case="memory_files",
        baseline="",
        baseline_seconds=0.0,
        baseline_samples=(),
        ratio=num_bytes / BOUND_BYTES,
        ratio_is=MEMORY,
        goal=1.0,
        met=num_bytes <= BOUND_BYTES,
        bytes=num_bytes,
        bound_bytes=BOUND_BYTES,
    )


def _saved(module: nn.Module, path: Path) -> Path:
    save_file({name: tensor.detach() for name, tensor in module.named_parameters()}, path)
    return path
