"""The source distribution: all that git tracks, and enough to install from."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import deltasync

pytest.importorskip("hatchling", reason="hatchling builds the distribution")

ROOT = Path(__file__).parents[1]


def run(*command: object, folder: Path = ROOT) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files there are")
def test_the_source_distribution_is_whole_and_installs(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(run("git", "ls-files").split()) <= names

    alone = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *alone, "--target", tmp_path / "site", packed)
    command = "from deltasync.cli import main; main()"
    shown = run(sys.executable, "-c", command, "--version", folder=tmp_path / "site")
    assert deltasync.__version__ in shown
