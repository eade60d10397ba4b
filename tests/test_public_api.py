"""What `import deltasync` offers, and what it must not cost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import deltasync

ROOT = Path(__file__).parents[1]
IMPORT = re.compile(r"^ *from (deltasync[\w.]*) import (\([^)]*\)|[^\n(]*)", re.MULTILINE)
OPTIONAL = [
    *("matplotlib", "opentelemetry", "prometheus_client", "pydantic_settings", "rich"),
    *("safetensors", "triton", "typer"),
]


def test_import_does_not_load_optional_dependencies() -> None:
    # torch loads triton by itself where both are installed: only what comes on top is ours.
    code = (
        "import sys, torch; before = set(sys.modules); import deltasync; "
        f"print(*[m for m in {OPTIONAL} if m in sys.modules and m not in before]); "
        "deltasync.config.read_secret, deltasync.store.sender"  # found without an import
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


def test_the_api_page_has_every_name_that_the_docs_import() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    public = set(re.findall(r"^::: (\S+)|`(deltasync\.\S+)`", page, re.MULTILINE))
    known = {name for pair in public for name in pair}
    docs = ROOT / "docs"
    pages = [ROOT / "README.md", *docs.rglob("*.md"), *(docs / "examples").glob("*.py")]
    missing = {
        f"{page.relative_to(ROOT)}: {module}.{name}"
        for page in pages
        for module, names in IMPORT.findall(page.read_text(encoding="utf-8"))
        if module not in ("deltasync.errors", "deltasync.transports")
        for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names))
        if f"{module}.{name}" not in known
    }
    assert missing == set()
