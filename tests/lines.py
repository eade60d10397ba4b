"""Counts lines of code, functions and classes by folder: python -m tests.lines [FOLDER ...].

A line of code holds a token of a statement: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CORE = ("delta", "sync", "wire", "transports")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


class Count(NamedTuple):
    files: int = 0
    lines: int = 0
    functions: int = 0
    classes: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*map(sum, zip(self, other, strict=True)))


def code_lines(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count(text: str) -> Count:
    nodes = list(ast.walk(ast.parse(text)))
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    return Count(1, code_lines(text), functions, classes)


def main(folders: list[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    total: dict[str, Count] = {}
    for name in listed.stdout.split():
        if not (ROOT / name).exists():
            continue
        one = count((ROOT / name).read_text())
        parts = Path(name).parts
        keys = [parts[0], "/".join(parts[: min(2, len(parts) - 1)])]
        if parts[0] == "deltasync" and parts[1] in CORE:
            keys.append("core: " + ", ".join(CORE))
        for key in set(keys):
            total[key] = total.get(key, Count()).plus(one)
    print(f"{'':40}{'files':>7}{'lines':>8}{'functions':>11}{'classes':>9}")
    for key in sorted(total):
        if not folders or any(key.startswith(folder) for folder in folders):
            files, lines, functions, classes = total[key]
            print(f"{key:40}{files:7}{lines:8}{functions:11}{classes:9}")
    pages = [*ROOT.glob("docs/**/*.md")]
    print(f"docs: {sum(len(page.read_text().split()) for page in pages)} words, {len(pages)} pages")


if __name__ == "__main__":
    main(sys.argv[1:])
