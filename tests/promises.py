"""The promises that tests are marked with, as a page: python -m tests.promises writes it.

`@pytest.mark.promise(SECTION, PROMISE)` stands above a test that fails if the promise is broken.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
HEAD = """\
# Promises and their tests

Each row has a promise of the README or of [Operations](operations.md), and the tests that fail
if it is broken. `python -m tests.promises` writes this page from the marks of the tests. (GPU)
says that a test needs one; `make test-engines` runs `tests/engines`.
"""
SECTIONS = (
    "Bits",
    "All or nothing",
    "Checks",
    "Cost",
    "Time",
    "Children",
    "Errors",
    "Engines and trainers of several ranks",
    "Security",
    "What operators see",
)
CONTRACT = "deltasync/testing/transport.py::TransportContract::"


class Mark(NamedTuple):
    section: str
    promise: str
    test: str


PROMISES_OF_CONTRACTS = {
    "All or nothing": {
        "A server lost while others write what arrives leaves none of them dirty, where the "
        "transport outlives losses.": ["test_losses_leave_frames_whole_where_it_is_said"],
    },
    "Time": {
        "A `receive_weights` that times out loses nothing.": [
            "test_short_timeouts_do_not_lose_frames"
        ],
        "Closing a transport wakes every waiting call.": ["test_closing_wakes_whoever_waits"],
        "A dead process is detected before any timeout.": [
            "test_a_receiver_killed_while_receiving_is_lost",
            "test_receivers_notice_a_killed_sender",
        ],
    },
    "Errors": {
        "`TransportTimeout`: a receiver that answers late is dropped, and the others continue.": [
            "test_who_replies_late_is_dropped_and_others_go_on"
        ],
    },
}
OF_CONTRACTS = [
    Mark(section, promise, CONTRACT + test)
    for section, promises in PROMISES_OF_CONTRACTS.items()
    for promise, tests in promises.items()
    for test in tests
]
"""What ships cannot be marked: who imports a contract need not know our marks."""


def marks(path: str, text: str) -> list[Mark]:
    """The marks of a file's tests, in their order."""
    return [
        Mark(ast.literal_eval(section), ast.literal_eval(promise), f"{path}::{name}")
        for name, test in _tests(ast.parse(text))
        for call in test.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.promise"
        for section, promise in [call.args]
    ]


def _tests(tree: ast.Module | ast.ClassDef) -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            found += [(f"{node.name}::{name}", test) for name, test in _tests(node)]
    return found


def page(found: list[Mark]) -> str:
    parts = [HEAD]
    for section in SECTIONS:
        parts.append(f"\n## {section}\n\n| promise | tests |\n|---|---|\n")
        rows: dict[str, list[str]] = {}
        for mark in found:
            if mark.section == section:
                rows.setdefault(mark.promise, []).append(f"`{mark.test}`")
        parts += [f"| {promise} | {' '.join(rows[promise])} |\n" for promise in sorted(rows)]
    return "".join(parts)


def all_marks() -> list[Mark]:
    files = subprocess.run(
        ["git", "ls-files", "tests/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    found = [
        mark
        for path in files
        if (ROOT / path).exists()
        for mark in marks(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    return found + OF_CONTRACTS


if __name__ == "__main__":
    PAGE.write_text(page(all_marks()), encoding="utf-8")
