"""Applies small faults to the product one at a time, and runs the tests that must find each.

python -m tests.mutants [NAME ...] [--file F] [--jobs N]
Exits with 1 unless all are killed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.entries import ROOT, Mutant, read_mutants

PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
TIMEOUT_S = 240.0
KILLED = {1: "killed", None: "killed by timeout"}


def run_tests(tree: Path, tests: Iterable[str], timeout_s: float) -> tuple[int | None, str]:
    """(pytest's exit code, None if it took too long; its output)."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *tests],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "mutants"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):  # tests may leave processes too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def judge(mutant: Mutant, tree: Path) -> str:
    """Apply a mutant to a copy, and run its tests: "killed", "survived", or what is wrong."""
    path = tree / mutant.file
    right = path.read_text(encoding="utf-8")
    try:
        write(path, mutant.applied(right))
        code, output = run_tests(tree, mutant.tests, TIMEOUT_S)
    except ValueError as error:
        return f"error: {error}"
    finally:
        write(path, right)
    if code in KILLED:
        return KILLED[code]
    return "survived" if code == 0 else f"error: pytest ended with {code}\n{output[-3000:]}"


def write(path: Path, text: str) -> None:
    """Write a module. What was compiled of it goes: it may be of the same second and length."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def copy_tree(tree: Path) -> None:
    """Copy what git tracks, or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def chosen(arguments: argparse.Namespace) -> list[Mutant]:
    mutants = read_mutants(*arguments.file)
    if unknown := set(arguments.names) - {mutant.name for mutant in mutants}:
        raise SystemExit(f"no such mutants: {', '.join(sorted(unknown))}")
    return [m for m in mutants if not arguments.names or m.name in arguments.names]


def judge_all(mutants: list[Mutant], folder: Path, jobs: int) -> Counter[str]:
    """Judge each in one of `jobs` copies of the tree; count the first words."""
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        copy_tree(folder / str(number))
        trees.put(folder / str(number))

    def in_some_tree(mutant: Mutant) -> str:
        tree, begin = trees.get(), time.monotonic()
        verdict = judge(mutant, tree)
        trees.put(tree)
        print(f"{mutant.name}: {verdict}, {time.monotonic() - begin:.0f} s", flush=True)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(in_some_tree, mutants)
        return Counter(verdict.split()[0].strip(":") for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--file", action="append", type=Path, default=[], help="a file of mutants")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    mutants = chosen(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        copy_tree(unchanged := Path(folder) / "unchanged")
        code, output = run_tests(unchanged, tests, TIMEOUT_S + 30 * len(tests))
        if code != 0:
            print(f"without a mutant, the tests do not pass ({code}):\n{output[-6000:]}")
            return 1
        counts = judge_all(mutants, Path(folder), arguments.jobs)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int(counts["killed"] != len(mutants))


if __name__ == "__main__":
    sys.exit(main())
