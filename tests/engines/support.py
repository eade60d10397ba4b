"""docs/integrations/support.md: what was found of which engine, on CPUs and on GPUs.

    python -m tests.engines.support [RECORDS ...]

Makes the table of GPUs again, of lines that `python -m tests.engines.gpu.run` wrote, and that of
vLLM's architectures, of lines that `make sweep-engines` wrote. That of CPUs is written by `make
test-engines`. Needs no engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import insert
from benchmarks.record import Environment
from benchmarks.report import describe, row
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


def write_cpu(page: Path, table: str) -> None:
    """Put the table of CPUs into the page."""
    _write(page, "cpu", table)


def write_gpu(page: Path, records: Iterable[Path]) -> None:
    """Put the table of GPUs into the page."""
    lines = [line for file in records for line in file.read_text(encoding="utf-8").splitlines()]
    _write(page, "gpu", make_table([json.loads(line) for line in lines]))


def write_swept(page: Path, record: Path) -> None:
    """Put the table of vLLM's architectures into the page."""
    _write(page, "swept", sweep.table(sweep.read(record)))


def _write(page: Path, name: str, text: str) -> None:
    page.write_text(insert(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def make_table(rows: list[Row]) -> str:
    """Markdown of rows in the order in which they were written. The latest of a case counts."""
    latest = {_case(one): one for one in rows}
    last = {one["name"]: one for one in rows}  # one that failed says no engine
    shown = [o for o in latest.values() if o["outcome"] != "failed" or o is last[o["name"]]]
    shown.sort(key=lambda one: (_engine(one), one["name"].split("/"), _gpus(one)))
    lines = [row(_COLUMNS), row("---" for _ in _COLUMNS), *(row(_cells(one)) for one in shown)]
    where = [describe(Environment(**one["environment"])) for one in shown if "environment" in one]
    return "\n".join([*lines, "", *dict.fromkeys(where)]).rstrip()


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
    write_gpu(PAGE, [Path(name) for name in sys.argv[1:]] or [RECORDS])
    write_swept(PAGE, sweep.RECORDS)
