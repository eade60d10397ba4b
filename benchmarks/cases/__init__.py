"""The groups of cases. A group is a function from a scale to records, run in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.cases.files import files
from benchmarks.cases.fleet import fleet
from benchmarks.cases.kernels import apply, commit, diff
from benchmarks.cases.memory import memory
from benchmarks.cases.observing import observing
from benchmarks.cases.syncs import crossover, small, sync
from benchmarks.record import Result
from benchmarks.workload import Scale

Group = Callable[[Scale], Iterator[Result]]

GROUPS: dict[str, Group] = {
    "diff": diff,
    "apply": apply,
    "commit": commit,
    "sync": sync,
    "crossover": crossover,
    "small": small,
    "memory": memory,
    "files": files,
    "observing": observing,
    "fleet": fleet,
}
