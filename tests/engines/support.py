"""The table of GPUs in docs/integrations/support.md, of what `tests.engines.gpu.run` has recorded.

    python -m tests.engines.support [RECORDS ...]

Needs no engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import Environment
from benchmarks.report import insert, row
from tests.engines.environment import ROOT

PAGE = ROOT / "docs" / "integrations" / "support.md"
RECORDS = ROOT / "benchmarks" / "results" / "support-gpu.jsonl"

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}

Row = dict[str, Any]


def summary(rows: list[Row]) -> str:
    """Markdown: a line for each architecture of an engine, with the setups of each outcome."""
    latest = {(_engine(one), _gpus(one), one["name"]): one for one in rows}
    last = {one["name"]: one for one in rows}  # one that failed names no engine
    shown = [o for o in latest.values() if o["outcome"] != "failed" or o is last[o["name"]]]
    shown.sort(key=lambda one: (_engine(one), one["name"].split("/"), _gpus(one)))
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in shown:
        architecture, _, setup = one["name"].partition("/")
        outcome = one["outcome"] + (", requests during syncs" if one.get("requests") else "")
        found.setdefault((_engine(one), architecture), {}).setdefault(outcome, []).append(setup)
    head = ("engine", "architecture", "found")
    lines = [row(head), f"|{'---|' * len(head)}"]
    for case, outcomes in found.items():
        texts = (f"{outcome}: {'; '.join(setups)}" for outcome, setups in outcomes.items())
        lines.append(row((*case, ". ".join(texts))))
    where = (Environment(**one["environment"]) for one in shown if "environment" in one)
    commits = "; ".join(dict.fromkeys(f"{e.gpu}, commit {e.commit[:12]}" for e in where))
    return "\n".join([*lines, "", commits]).rstrip()


def _engine(one: Row) -> str:
    return next((f"{_ENGINES[key]} {one[key]}" for key in _ENGINES if key in one), "")


def _gpus(one: Row) -> str:
    return ", ".join(one.get("gpus", ()))


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]] or [RECORDS]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    text = insert(PAGE.read_text(encoding="utf-8"), "gpu", summary(rows))
    PAGE.write_text(text, encoding="utf-8")
