"""Runs each group of cases in a process of its own: one thread, a fresh heap, no leftovers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks import processes
from benchmarks.cases import GROUPS
from benchmarks.record import Result
from benchmarks.workload import SCALES


class GroupFailed(RuntimeError):
    """A group's process ended badly; its error is on stderr."""


def run_group(group: str, scale: str) -> Iterator[Result]:
    """Records of one group, as they come. Raises GroupFailed."""
    with processes.start("benchmarks.runner", group, scale) as process:
        assert process.stdout is not None
        try:
            yield from map(Result.from_json, process.stdout)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise GroupFailed(f"{group} ended with {process.returncode}")


def main(group: str, scale: str) -> None:
    """The group's process: a record a line on stdout."""
    torch.set_num_threads(1)
    for result in GROUPS[group](SCALES[scale]):
        print(result.to_json(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
