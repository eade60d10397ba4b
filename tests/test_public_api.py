"""What `import deltasync` offers, and what it must not cost."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import deltasync
import deltasync.errors
from tests.public_api import FILE, Name, lines, public

ROOT = Path(__file__).parents[1]
IMPORT = re.compile(r"^ *from (deltasync[\w.]*) import (\([^)]*\)|[^\n(]*)", re.MULTILINE)
OWN = {
    "Path",
    "TYPE_CHECKING",
    "annotations",
    "find_spec",
    "import_module",
}  # what the package uses
OPTIONAL = [
    *("matplotlib", "opentelemetry", "prometheus_client", "pydantic_settings", "rich"),
    *("safetensors", "triton", "typer"),
]


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


def test_no_public_name_changes_unseen() -> None:
    assert list(lines()) == FILE.read_text(encoding="utf-8").splitlines(), (
        "the public API has changed: if that is meant, run `python -m tests.public_api`, and tell "
        "users in CHANGELOG.md"
    )


# What users are given and hand on, or leave out; they need not name it.
UNNAMED = {
    "LocalWeights": "what `WeightSender` of a verl trainer is given instead of a source",
    "Proof": "of RoutedTarget and ReloadedTarget, for the workers of engines",
    "Upkeep": "likewise",
    "Piece": "likewise",
    "Computed": "made by ServedSource",
    "Address": "where a trainer listens, in what an EngineSync gives to workers",
    "Held": "what `hold` gives `export_weights`",
    "HostBackend": "of StreamedWeights, for senders",
    "SentLayout": "likewise",
    "Staging": "what a WeightReceiver and a StoreReceiver have in common",
}


def test_what_public_signatures_name_is_public() -> None:
    known = {id(name.value) for name in public()} | {id(e) for e in vars(deltasync.errors).values()}
    missing = {
        f"{name.path}: {kind.__qualname__}"
        for name in public()
        for kind in named_by(name)
        if id(kind) not in known and kind.__name__ not in UNNAMED
    }
    assert missing == set()


def named_by(name: Name) -> Iterator[type]:
    """Our classes in the annotations of a name and of its members."""
    members = [name.value, *name.members().values()] if callable(name.value) else []
    for member in members:
        if isinstance(member, property):
            member = member.fget
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        if inspect.isfunction(member) or inspect.isclass(member):
            for hint in typing.get_type_hints(member).values():
                yield from classes_in(hint)


def classes_in(hint: object) -> Iterator[type]:
    if inspect.isclass(hint) and hint.__module__.startswith("deltasync"):
        yield hint
    for part in typing.get_args(hint):
        yield from (
            one
            for each in ([*part] if isinstance(part, list) else [part])
            for one in classes_in(each)
        )
