"""Reads the files of mutants: each entry is a small fault, and the tests that must find it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: Unique, in kebab case.
        promise: What it breaks.
        file: Path from the repository's root.
        old: Text that stands there exactly once.
        new: What takes its place.
        tests: Those that must fail: path::function, as pytest takes them.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file with the fault. Raises ValueError if `old` does not stand there exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: old stands {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def read_mutants(*paths: Path) -> list[Mutant]:
    """The entries of these files, or of all files of this folder."""
    return [
        Mutant(**{**entry, "tests": tuple(entry["tests"])})
        for path in paths or sorted(FOLDER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]
