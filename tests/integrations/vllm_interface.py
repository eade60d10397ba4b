"""What versions of vLLM have of what our files use, read from their source without importing it.

    python -m tests.integrations.vllm_interface 0.34.0 FOLDER

notes a version down in `vllm_interfaces.json`; FOLDER holds the package `vllm`, unpacked from a
wheel or a source distribution. When our files use something new, do that for each version.
A name has its arguments there, after "abstract" if engines have to implement it, or "value". Each
version tells what is not as in the one before, and null for what is gone.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from tests.integrations.vllm_uses import (
    BASE,
    TRAINER_BASE,
    Function,
    arguments,
    methods,
    uses,
)

_FILE = Path(__file__).with_name("vllm_interfaces.json")
_ROUTE = re.compile(r'@router\.(\w+)\(\s*"(/\w+)"')


def noted() -> dict[str, dict[str, str]]:
    """What is known, by version."""
    known: dict[str, str] = {}
    by_version = {}
    for version, changes in json.loads(_FILE.read_text(encoding="utf-8")).items():
        known = {name: fact for name, fact in (known | changes).items() if fact is not None}
        by_version[version] = known
    return by_version


def note(version: str, folder: Path) -> None:
    by_version = (noted() if _FILE.exists() else {}) | {version: facts_of(folder)}
    before: dict[str, str] = {}
    changes = {}
    for one in sorted(by_version, key=lambda text: [int(part) for part in text.split(".")]):
        now = by_version[one]
        names = sorted(name for name in before | now if before.get(name) != now.get(name))
        changes[one] = {name: now.get(name) for name in names}
        before = now
    _FILE.write_text(json.dumps(changes, indent=1) + "\n", encoding="utf-8")


def facts_of(folder: Path) -> dict[str, str]:
    """Of all that our files use, and of what an engine has to implement."""
    definitions = {use.name: _find(folder, use.name) for use in uses()}
    facts = {name: _fact(one) for name, one in definitions.items() if one}
    for name in (BASE, TRAINER_BASE):
        base = _find(folder, name)
        assert base
        for method in methods(base.node):
            if "abstractmethod" in _marks(method):
                facts[f"{name}.{method.name}"] = f"abstract {arguments(method)}"
    for file in (folder / "vllm" / "entrypoints").rglob("*.py"):
        routes = [" ".join(one) for one in _ROUTE.findall(file.read_text(encoding="utf-8"))]
        facts |= {route: "value" for route in routes if route in definitions}
    return facts


@dataclass(frozen=True)
class _Definition:
    """A statement that defines a name, in a module, or in a class of one."""

    folder: Path
    module: str
    node: ast.AST
    is_member: bool = False


def _find(folder: Path, name: str) -> _Definition | None:
    """What a name with its module, and perhaps its class, stands for."""
    module, _, last = name.rpartition(".")
    if not module or (found := _defined(folder, module, last)):
        return found if module else None
    owner = _find(folder, module)
    return owner and _member(owner, last)


def _defined(folder: Path, module: str, name: str) -> _Definition | None:
    """Where a module has a name from, past those that only import it."""
    if not (file := _file(folder, module)):
        return None
    for node in ast.walk(_parsed(file)):  # outer ones first
        if name in _names(node):
            return _Definition(folder, module, node)
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if name == (one.asname or one.name):
                    package = module if file.stem == "__init__" else module.rpartition(".")[0]
                    source = resolve_name("." * node.level + (node.module or ""), package)
                    return _defined(folder, source, one.name)
    return None


def _member(owner: _Definition, name: str) -> _Definition | None:
    """Of a class, or of one that it inherits from."""
    if not isinstance(owner.node, ast.ClassDef):
        return None
    init = [method for method in methods(owner.node) if method.name == "__init__"]
    for node in (*owner.node.body, *(node for one in init for node in ast.walk(one))):
        if name in _names(node):
            return _Definition(owner.folder, owner.module, node, is_member=True)
    for base in owner.node.bases:
        definition = _defined(owner.folder, owner.module, ast.unparse(base))
        if definition and (found := _member(definition, name)):
            return found
    return None


def _fact(found: _Definition) -> str:
    match found.node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
            return arguments(node, is_member=found.is_member)
        case ast.ClassDef(body=body) as node if "dataclass" in _marks(node):
            fields = [ast.unparse(one.target) for one in body if isinstance(one, ast.AnnAssign)]
            return f"({', '.join(fields)})"
    return "value"


def _names(node: ast.AST) -> set[str]:
    """What a statement defines; `name` for `self.name`."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {ast.unparse(one).removeprefix("self.") for one in targets}
        case ast.AnnAssign(target=target):
            return {ast.unparse(target).removeprefix("self.")}
    return set()


def _marks(node: Function | ast.ClassDef) -> set[str]:
    return {ast.unparse(one) for one in node.decorator_list}


def _file(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    note(sys.argv[1], Path(sys.argv[2]))
