"""`python -m benchmarks scale`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from benchmarks.gpu.report import insert
from benchmarks.record import ROOT
from benchmarks.scale import fanout
from benchmarks.scale.fanout import RECORD, FanOut


def scale(
    measure: Annotated[
        bool, typer.Option("--measure", help=f"Measure {RECORD.relative_to(ROOT)} first.")
    ] = False,
) -> None:
    """Fit costs to all records, check them, and write predictions into docs/scale.md."""
    from benchmarks.scale import report  # it draws, and not all who measure have matplotlib

    if measure:
        RECORD.write_text(fanout.measure().to_json() + "\n", encoding="utf-8")
    fan_out = FanOut.from_json(RECORD.read_text(encoding="utf-8"))
    page = report.PAGE.read_text(encoding="utf-8")
    for name, text in report.sections(fan_out).items():
        page = insert(page, name, text)
        print(text, end="\n\n")
    report.PAGE.write_text(page, encoding="utf-8")
    print(json.dumps({"page": str(report.PAGE), "image": str(report.draw(fan_out))}))
