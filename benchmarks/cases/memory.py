"""Two processes: the memory that a sync takes at both ends, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.cases.kernels import size_of
from benchmarks.pair import Model, Pair, open_pair
from benchmarks.record import MEMORY, Result
from benchmarks.workload import Flip, Scale
from deltasync import SenderOptions
from deltasync.delta.patch import CHUNK_NUMEL

TEMPORARY_BYTES = 24 * CHUNK_NUMEL  # of one chunk: mask, int32 and int64 positions, old and new
MIN_STAGED_BYTES = 64 << 20  # the default of ReceiverOptions.max_staged_bytes for small models


def memory(scale: Scale) -> Iterator[Result]:
    """Resident memory beside the weights and the snapshot, against the design's bounds."""
    options = SenderOptions(bucket_bytes=scale.bucket_bytes)
    for density in scale.memory:
        with open_pair(Model(hidden=scale.hidden, layers=scale.layers), options) as pair:
            flip = Flip(pair.module, density)
            yield from _measured(pair, flip, density, scale.bucket_bytes)


def _measured(pair: Pair, flip: Flip, density: float, bucket_bytes: int) -> Iterator[Result]:
    flip.apply()
    pair.trim()
    before = {"sender": Resident.start("self"), "receiver": Resident.start(pair.engine_pid)}
    done = pair.sync()
    taken = {
        "sender": before["sender"].taken("self"),
        "receiver": before["receiver"].taken(pair.engine_pid),
    }
    pair.check()
    weights = done.stats.dense_bytes
    bounds = {
        "sender": weights // 20 + 2 * bucket_bytes + TEMPORARY_BYTES,
        # The sender's slots are mapped at the receiver too.
        "receiver": max(MIN_STAGED_BYTES, weights // 4) + 2 * bucket_bytes + TEMPORARY_BYTES,
    }
    for end, num_bytes in taken.items():
        yield Result(
            case=f"memory_{end}",
            **size_of(pair.module, flip, density),
            seconds=done.seconds,
            samples=(done.seconds,),
            ratio=num_bytes / bounds[end],
            ratio_is=MEMORY,
            goal=1.0,
            met=num_bytes <= bounds[end],
            bytes=num_bytes,
            bound_bytes=bounds[end],
        )


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident bytes of a process at one moment."""

    num_bytes: int

    @classmethod
    def start(cls, pid: int | str) -> Self:
        """Note what is resident now, and let the kernel's high-water mark begin here."""
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        return cls(_status_bytes(pid, "VmRSS"))

    def taken(self, pid: int | str) -> int:
        """The most that was resident since, beyond what was then."""
        return _status_bytes(pid, "VmHWM") - self.num_bytes


def _status_bytes(pid: int | str, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {key} in /proc/{pid}/status")
