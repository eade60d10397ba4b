"""Limits that keep the package readable and safe, checked over its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lines import code_lines

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deltasync"
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
UNPICKLING_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
UNPICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "recv_pyobj",
    "scatter_object_list",
    "send_object_list",
    "send_pyobj",
}


def findings(path: Path) -> Iterator[str]:
    text, inside = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE)
    if (lines := code_lines(text)) > MAX_FILE_LINES:
        yield f"{inside}: {lines} lines of code, over {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        for problem in problems(node, inside.parts[0].removesuffix(".py")):
            yield f"{inside}:{getattr(node, 'lineno', 0)}: {problem}"


def problems(node: ast.AST, top: str) -> Iterator[str]:
    """Of one node; `top` is its layer: a folder or a module of the package."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    for name in mentioned(node):
        first, last = name.split(".")[0], name.split(".")[-1]
        if name in ENVIRONMENT and top not in {"cli", "config"}:
            yield f"{name} outside config and cli"
        if (is_import and first in UNPICKLING_MODULES) or last in UNPICKLING_CALLS:
            yield f"{name} pickles"
        if name in {"torch.load", "torch.save"}:
            yield f"{name} pickles"
    match node:
        case ast.Call(func=ast.Name("getattr"), args=[owner, attribute, *_]):
            if dotted(owner).split(".")[0] == "torch" and not isinstance(attribute, ast.Constant):
                yield "getattr(torch, text) reaches any attribute; use a closed table"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names; an empty first part stands for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def mentioned(node: ast.AST) -> list[str]:
    """Dotted names that an import or an attribute access mentions."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return [dotted(node)] if isinstance(node, ast.Attribute) else []


@pytest.mark.promise("Security", "Nothing is unpickled.")
def test_the_package_keeps_the_rules() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert PACKAGE / "errors.py" in paths
    found = [problem for path in paths for problem in findings(path)]
    assert not found, "\n" + "\n".join(found)
