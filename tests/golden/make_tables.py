"""Writes the tables of the protocol into docs/wire-format.md: `python -m tests.golden.make_tables`.

They are made from the tables that the sessions follow, so that the page cannot say anything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from deltasync.sync.protocol import receiver_session, sender_session
from deltasync.sync.protocol.sender_session import SenderSession
from deltasync.sync.protocol.table import Rule

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-format.md"
RECEIVER_RULES: list[Rule[Any]] = [*receiver_session._rules()]
SENDER_RULES: list[Rule[Any]] = [*sender_session._rules()]
HIDDEN = {"begun"}  # follows from the state


def kind_of(rule: Rule[Any]) -> str:
    return rule.on if isinstance(rule.on, str) else str(rule.on.model_fields["kind"].default)


def says(function: object) -> str:
    """A docstring on one line, without its last full stop."""
    return " ".join((function.__doc__ or "").split()).removesuffix(".")


def states_of(rule: Rule[Any]) -> str:
    names: list[Enum] = [*rule.states[0].__class__]
    missing = [state.name for state in names if state not in rule.states]
    if not missing:
        return "any"
    if len(rule.states) > len(names) / 2 and len(missing) == 1:
        return f"any but {missing[0]}"
    return ", ".join(state.name for state in rule.states)


def then_of(rule: Rule[Any]) -> str:
    return "the same" if rule.then is None or rule.states == (rule.then,) else str(rule.then.name)


def changes(rule: Rule[Any]) -> list[str]:
    seen = {n: v for n, v in rule.sets.items() if not n.startswith("_") and n not in HIDDEN}
    made = []
    for word, names in (
        ("sets", [name for name, value in seen.items() if value]),
        ("clears", [name for name, value in seen.items() if not value]),
    ):
        if names:
            made.append(f"{word} " + ", ".join(f"`{name}`" for name in names))
    return made


def lines_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(row)} |\n" for row in (header, *rows))
    return "".join((head, f"|{'---|' * len(header)}\n", *lines))


def table_of_receivers() -> str:
    rows = []
    for rule in RECEIVER_RULES:
        comes = f"*{rule.on}*" if isinstance(rule.on, str) else f"`{kind_of(rule)}`"
        follows = "; ".join(filter(None, [says(rule.do) if rule.do else "", *changes(rule)]))
        follows = follows[:1].upper() + follows[1:]
        when = rule.when.text if rule.when else ""
        rows.append((states_of(rule), comes, when, then_of(rule), follows))
    return lines_of(["while", "comes", "if", "then", "and"], rows)


def table_of_senders() -> str:
    rows = []
    for rule in SENDER_RULES:
        method = getattr(SenderSession, str(rule.on))
        meaning = says(method).split(". ")[0]
        rows.append((states_of(rule), f"*{rule.on}*", meaning, then_of(rule), says(rule.do)))
    return lines_of(["while", "comes", "which means", "then", "and"], rows)


def diagram_of(rules: Sequence[Rule[Any]]) -> str:
    """Every rule that leads to another state, in order."""
    moves = [rule for rule in rules if then_of(rule) != "the same"]
    edges: dict[tuple[str, str], list[str]] = {}
    for rule in moves:
        kinds = edges.setdefault((states_of(rule), kind_of(rule)), [])
        kinds.append(then_of(rule))
    width = max(len(states) for states, _ in edges)
    longest = max(len(kind) for _, kind in edges)
    drawn = [
        f"{states:{width}} --{kind}{'-' * (longest - len(kind))}--> {' or '.join(then)}\n"
        for (states, kind), then in edges.items()
    ]
    return "```text\n" + "".join(drawn) + "```\n"


def parts() -> dict[str, str]:
    """Marker -> what stands behind it in the page."""
    return {
        "receiver-diagram": diagram_of(RECEIVER_RULES),
        "receiver-table": table_of_receivers(),
        "sender-diagram": diagram_of(SENDER_RULES),
        "sender-table": table_of_senders(),
    }


def page_with(page: str) -> str:
    """The page as the tables make it."""
    for name, text in parts().items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->\n)"
        page, count = re.subn(pattern, lambda m, t=text: m[1] + t + m[2], page, flags=re.DOTALL)  # type: ignore[misc]
        assert count == 1, name
    return page


if __name__ == "__main__":
    DOCUMENT.write_text(page_with(DOCUMENT.read_text()))
