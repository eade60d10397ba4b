"""The layer contracts of pyproject.toml hold, and would be broken by an import that points up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [
    "cli",
    "delta",
    "demo",
    "store",
    "files",
    "integrations",
    "observe",
    "quant",
    "sync",
    "testing",
    "transports",
    "wire",
]
MODULES = ["config", "dtypes", "errors"]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [command, "--no-logo", "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def empty_package(tmp_path: Path) -> Path:
    """A tree with the package's modules, all empty, under the same contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    paths = ["__init__.py", *(f"{name}/__init__.py" for name in PACKAGES)]
    for path in paths + [f"{name}.py" for name in MODULES]:
        file = tmp_path / "deltasync" / path
        file.parent.mkdir(exist_ok=True)
        file.touch()
    return tmp_path


def test_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_allowed_imports_pass(empty_package: Path) -> None:
    package = empty_package / "deltasync"
    (package / "cli/__init__.py").write_text("import deltasync.demo, deltasync.sync\n")
    (package / "delta/__init__.py").write_text("import torch, deltasync.wire, deltasync.errors\n")
    result = lint_imports(empty_package)
    assert result.returncode == 0, result.stdout + result.stderr


FORBIDDEN = [
    ("wire/__init__.py", "deltasync.sync"),
    ("wire/__init__.py", "torch"),
    ("errors.py", "deltasync"),
    ("dtypes.py", "torch"),
    ("delta/__init__.py", "deltasync.transports"),
    ("transports/__init__.py", "deltasync.delta"),
    ("sync/__init__.py", "deltasync.config"),
    ("sync/__init__.py", "deltasync.testing"),
    ("sync/__init__.py", "deltasync.observe"),
    ("store/__init__.py", "deltasync.observe"),
    ("cli/__init__.py", "deltasync.testing"),
    ("demo/__init__.py", "deltasync.cli"),
    ("transports/__init__.py", "pickle"),
]


def test_forbidden_imports_are_found(empty_package: Path) -> None:
    package = empty_package / "deltasync"
    (package / "__init__.py").write_text("import deltasync.sync\n")
    for importer, imported in FORBIDDEN:
        with (package / importer).open("a", encoding="utf-8") as file:
            file.write(f"import {imported}\n")
    result = lint_imports(empty_package)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.count("BROKEN") == 4
    for importer, imported in FORBIDDEN:
        name = f"deltasync.{importer.removesuffix('.py').removesuffix('/__init__')}"
        assert f"{name} -> {imported} (l." in result.stdout


def test_a_module_without_a_place_is_found(empty_package: Path) -> None:
    package = empty_package / "deltasync"
    (package / "__init__.py").write_text("import deltasync.sync\n")
    (package / "unplaced.py").write_text("import deltasync.errors\n")
    result = lint_imports(empty_package)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout
