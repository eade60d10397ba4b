"""Counts lines of code by folder: python -m tests.lines [FOLDER ...].

A line of code holds a token of a statement: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

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


def main(folders: list[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files, lines = Counter[str](), Counter[str]()
    for name in listed.stdout.split():
        if not (ROOT / name).exists():
            continue
        count, parts = code_lines((ROOT / name).read_text()), Path(name).parts
        keys = {parts[0], "/".join(parts[: min(2, len(parts) - 1)])}
        if parts[0] == "deltasync" and parts[1] in CORE:
            keys.add("core: " + ", ".join(CORE))
        for key in keys:
            files[key] += 1
            lines[key] += count
    print(f"{'':40}{'files':>7}{'lines':>8}")
    for key in sorted(files):
        if not folders or any(key.startswith(folder) for folder in folders):
            print(f"{key:40}{files[key]:7}{lines[key]:8}")


if __name__ == "__main__":
    main(sys.argv[1:])
