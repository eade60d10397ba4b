"""Limits that keep the package readable and safe, checked over its source.

A rule takes a file's text, its syntax tree and its path inside the package, and yields a line
number and what is wrong there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lines import code_lines

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deltasync"
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
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


@dataclass(frozen=True)
class Source:
    text: str
    path: str
    """Relative to the package, with forward slashes."""

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(ast.parse(self.text))

    @property
    def top(self) -> str:
        """The layer: a folder or a module of the package."""
        return self.path.split("/")[0].removesuffix(".py")


Finding = tuple[int, str]
Rule = Callable[[Source], Iterator[Finding]]


def long_function(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"


def long_file(source: Source) -> Iterator[Finding]:
    lines = code_lines(source.text)
    if lines > MAX_FILE_LINES:
        yield lines, f"{lines} lines of code, over {MAX_FILE_LINES}"


def environment_outside_config(source: Source) -> Iterator[Finding]:
    if source.top in {"cli", "config"}:
        return
    for node in source.nodes:
        for name in mentioned(node):
            if name in {"os.environ", "os.environb", "os.getenv", "os.putenv"}:
                yield line_of(node), f"{name} outside config and cli"


def unpickling(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        for name in mentioned(node):
            first, last = name.split(".")[0], name.split(".")[-1]
            if (
                (first in UNPICKLING_MODULES and isinstance(node, ast.Import | ast.ImportFrom))
                or name in {"torch.load", "torch.save"}
                or last in UNPICKLING_CALLS
            ):
                yield line_of(node), f"{name} pickles"


def torch_attribute_by_text(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if (
            isinstance(node, ast.Call)
            and dotted(node.func) == "getattr"
            and len(node.args) > 1
            and dotted(node.args[0]).split(".")[0] == "torch"
            and not isinstance(node.args[1], ast.Constant)
        ):
            yield node.lineno, "getattr(torch, text) reaches any attribute; use a closed table"


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


def line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


RULES: list[Rule] = [
    long_function,
    long_file,
    environment_outside_config,
    unpickling,
    torch_attribute_by_text,
]


def package_sources() -> list[Source]:
    return [
        Source(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix())
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


@pytest.mark.promise("Security", "Nothing is unpickled.")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Rule) -> None:
    findings = [
        f"deltasync/{source.path}:{line}: {problem}"
        for source in package_sources()
        for line, problem in rule(source)
    ]
    assert not findings, "\n" + "\n".join(findings)
