"""docs/integrations/support.md: what was found of which engine, on CPUs and on GPUs.

    python -m tests.engines.support [RECORDS ...]

Makes the table of GPUs again, of lines that `python -m tests.engines.gpu.run` wrote, and that of
vLLM's architectures, of lines that `make sweep-engines` wrote. That of CPUs is written by `make
test-engines`. Prints both with kernels and reasons, which the page leaves out. Needs no engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import Environment
from benchmarks.report import insert, row
from tests.engines import sweep
from tests.engines.environment import ROOT

PAGE = ROOT / "docs" / "integrations" / "support.md"
RECORDS = ROOT / "benchmarks" / "results" / "support-gpu.jsonl"

_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
_COLUMNS = ("engine", "GPU", "architecture", "setup", "kernels", "found")
# No kernels, or torch's own.
_PLAIN = {
    "CompressedTensorsKVCacheMethod",
    "CompressedTensorsLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
}
_LONGEST = 240  # characters of a reason

Row = dict[str, Any]
Found = Mapping[tuple[str, str], Mapping[str, str]]
"""By engine with its version, and architecture: what was found in which setup."""


def write_cpu(page: Path, found: Found) -> None:
    """Put the table of CPUs into the page."""
    _write(page, "cpu", make_cpu_table(found))


def write_gpu(page: Path, records: Iterable[Path]) -> None:
    """Put the table of GPUs into the page."""
    _write(page, "gpu", make_summary(read(records)))


def write_swept(page: Path, record: Path) -> None:
    """Put the table of vLLM's architectures into the page."""
    _write(page, "swept", sweep.summary(sweep.read(record)))


def read(records: Iterable[Path]) -> list[Row]:
    lines = [line for file in records for line in file.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines]


def _write(page: Path, name: str, text: str) -> None:
    page.write_text(insert(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def make_cpu_table(found: Found) -> str:
    """Markdown: a line for what was found of an engine, with the architectures of which it was."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for (engine, architecture), outcomes in sorted(found.items()):
        others = " and ".join(setup for setup in outcomes if setup != "1")
        text = f"{architecture} ({others})" if others else architecture
        outcome = ", ".join(dict.fromkeys(outcomes.values()))
        grouped.setdefault((engine, outcome), []).append(text)
    lines = [row((*case, "; ".join(texts))) for case, texts in sorted(grouped.items())]
    head = ("engine", "found", "architectures")
    return "\n".join([row(head), row("---" for _ in head), *lines])


def make_summary(rows: list[Row]) -> str:
    """Markdown: a line for each architecture of an engine, with the setups of each outcome."""
    shown = _latest(rows)
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in shown:
        architecture, _, setup = one["name"].partition("/")
        outcome = one["outcome"] + (", requests during syncs" if one.get("requests") else "")
        found.setdefault((_engine(one), architecture), {}).setdefault(outcome, []).append(setup)
    head = ("engine", "architecture", "found")
    lines = [row(head), row("---" for _ in head)]
    for case, outcomes in found.items():
        texts = (f"{outcome}: {'; '.join(setups)}" for outcome, setups in outcomes.items())
        lines.append(row((*case, ". ".join(texts))))
    return "\n".join([*lines, "", *_where(shown)]).rstrip()


def make_table(rows: list[Row]) -> str:
    """Markdown of rows in the order in which they were written. The latest of a case counts."""
    shown = _latest(rows)
    lines = [row(_COLUMNS), row("---" for _ in _COLUMNS), *(row(_cells(one)) for one in shown)]
    return "\n".join([*lines, "", *_where(shown)]).rstrip()


def _latest(rows: list[Row]) -> list[Row]:
    latest = {_case(one): one for one in rows}
    last = {one["name"]: one for one in rows}  # one that failed says no engine
    shown = [o for o in latest.values() if o["outcome"] != "failed" or o is last[o["name"]]]
    return sorted(shown, key=lambda one: (_engine(one), one["name"].split("/"), _gpus(one)))


def _where(rows: list[Row]) -> list[str]:
    """GPUs and commits, in a line."""
    found = (Environment(**one["environment"]) for one in rows if "environment" in one)
    return ["; ".join(dict.fromkeys(f"{e.gpu}, commit {e.commit[:12]}" for e in found))]


def _case(one: Row) -> tuple[str, str, str]:
    return _engine(one), _gpus(one), one["name"]


def _engine(one: Row) -> str:
    """Failed rows do not say it."""
    return next((f"{_ENGINES[key]} {one[key]}" for key in _ENGINES if key in one), "")


def _gpus(one: Row) -> str:
    return ", ".join(one.get("gpus", ()))


def _cells(one: Row) -> Iterator[str]:
    architecture, _, setup = one["name"].partition("/")
    kernels = sorted(set(one.get("kernels", ())) - _PLAIN)
    yield from (_engine(one), _gpus(one), architecture, setup, ", ".join(kernels))
    yield "; ".join(_found(one))


def _found(one: Row) -> Iterator[str]:
    """The outcome, and why it is not a better one."""
    outcome = one["outcome"]
    if outcome == "failed":
        last = (one["printed"].strip().splitlines() or [""])[-1]
        yield f"failed: {_short(last)}"
    elif outcome == "WRONG":
        wrong = one["wrong"] or one.get("failures") or ["its tokens"]
        yield f"WRONG: {_short(', '.join(wrong))}"
    elif why := one.get("refused"):
        yield f"{outcome}: {_short(why)}"
    else:
        yield outcome
    if one.get("requests"):
        failed = len(one["failures"]) or "none"
        yield f"{one['requests']} requests during {len(one['syncs'])} syncs, {failed} failed"


def _short(text: str) -> str:
    """On one line, as a cell."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]] or [RECORDS]
    write_gpu(PAGE, files)
    write_swept(PAGE, sweep.RECORDS)
    sys.stdout.write(make_table(read(files)) + "\n\n" + sweep.table(sweep.read(sweep.RECORDS)))
