"""What `import deltasync` offers, and what it must not cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import deltasync

ROOT = Path(__file__).parents[1]
EXPECTED = {
    "ChunkedPatch",
    "DensePatch",
    "ModuleSource",
    "ModuleTarget",
    "SparsePatch",
    "WeightReceiver",
    "WeightSender",
    "apply_patch",
    "diff",
    "sync_after_step",
}
OWN = {"TYPE_CHECKING", "annotations", "import_module"}  # what the package itself uses
OPTIONAL = ["matplotlib", "pydantic_settings", "rich", "safetensors", "triton", "typer"]


def test_all_is_sorted() -> None:
    # Plain string order, which puts classes before functions.
    assert list(deltasync.__all__) == sorted(deltasync.__all__)


def test_all_is_complete() -> None:
    public = {
        name
        for name in dir(deltasync)
        for value in [getattr(deltasync, name)]
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in OWN
    }
    assert public == {name for name in deltasync.__all__ if not name.startswith("_")}


def test_the_promised_names_are_public() -> None:
    assert set(deltasync.__all__) >= EXPECTED


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    values = {name: getattr(deltasync, name) for name in deltasync.__all__}
    without = [
        name
        for name, value in values.items()
        # dataclass fills in "Name(field: type)" where there is none.
        if callable(value) and (value.__doc__ or f"{name}(").startswith(f"{name}(")
    ]
    assert without == []


def test_import_does_not_load_optional_dependencies() -> None:
    # torch loads triton by itself where both are installed: only what comes on top is ours.
    code = (
        "import sys, torch; before = set(sys.modules); import deltasync; "
        f"print(*[m for m in {OPTIONAL} if m in sys.modules and m not in before])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
    assert [name for name in deltasync.__all__ if f"::: deltasync.{name}" not in page] == []
