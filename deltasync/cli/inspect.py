"""`deltasync inspect`: take a frame or a patch file apart."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from deltasync.cli.ending import FAILED
from deltasync.cli.terminal import (
    AsJson,
    FilePath,
    count,
    cut,
    make_console,
    make_table,
    print_json,
    size,
)

if TYPE_CHECKING:
    from rich.console import Console

    from deltasync.files.inspection import FrameFacts, Inspection


def inspect(
    file: FilePath,
    limit: Annotated[
        int, typer.Option(min=0, help="Parameters, frames, and rows of each bucket to show.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the parts of a frame or patch file, and what is wrong where.

    Exits with 1 if it is damaged. Rules are those of docs/wire-format.md.
    """
    from deltasync.files.inspection import Inspection

    found = Inspection(file)
    if as_json:
        print_json(_as_json(found, limit))
    else:
        _print(make_console(), found, limit)
    if found.fault is not None:
        raise typer.Exit(FAILED)


def _as_json(found: Inspection, limit: int) -> dict[str, Any]:
    return {
        "bytes": found.num_bytes,
        "is_patch": found.is_patch,
        "frames": [
            {
                "offset": frame.offset,
                "header_bytes": frame.header_bytes,
                "payload_bytes": frame.payload_bytes,
                "checksum": frame.checksum,
                "message": frame.message.model_dump(mode="json"),
                "codecs": frame.codecs,
                "rows": list(islice(frame.row_facts(), limit)),
            }
            for frame in found.frames
        ],
        "fault": None if found.fault is None else asdict(found.fault),
    }


def _print(console: Console, found: Inspection, limit: int) -> None:
    what = "patch file" if found.is_patch else "frames"
    console.print(f"{what}, {size(found.num_bytes)}, {count(len(found.frames))} sound frames")
    if found.frames:
        console.print(_frames(found.frames, limit))
    for frame in found.frames[:limit]:
        console.print()
        _print_message(console, frame, limit)
    if found.fault is not None:
        fault = found.fault
        where = f"at byte {count(fault.offset)}, rule {fault.rules}"
        console.print("damaged", style="bold red", end=" ")
        console.print(f"{where}: {fault.error}: {fault.reason}", soft_wrap=True)


def _frames(frames: list[FrameFacts], limit: int) -> Table:
    table = make_table("frame", "offset", "header", "payload", "rows", "checksum")
    for frame in frames[:limit]:
        table.add_row(
            frame.message.kind,
            count(frame.offset),
            count(frame.header_bytes),
            count(frame.payload_bytes),
            count(len(frame.rows)) if len(frame.rows) else "",
            frame.checksum,
        )
    return cut(table, len(frames) - limit)


def _print_message(console: Console, frame: FrameFacts, limit: int) -> None:
    console.print(Text.assemble((frame.message.kind, "bold"), f" at {count(frame.offset)}"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in frame.message.model_dump(mode="json").items():
        if name not in ("kind", "parameters"):
            grid.add_row(f"  {name}", str(value))
    console.print(grid)
    if len(frame.codecs) > 1:
        console.print(_codecs(frame.codecs))
    if parameters := getattr(frame.message, "parameters", None):
        console.print(_parameters(parameters, limit))
    if len(frame.rows):
        console.print(_rows(frame, limit))


def _codecs(codecs: dict[str, int]) -> Table:
    table = make_table("codec", "bytes")
    for name, num_bytes in codecs.items():
        table.add_row(name, count(num_bytes))
    return table


def _parameters(entries: Any, limit: int) -> Table:
    from deltasync.wire.messages import parameter_specs

    table = make_table("number", "names", "shape", "dtype", names=3)
    table.columns[0].justify = "right"
    for number, spec in enumerate(parameter_specs(entries[:limit])):
        shape = str(list(spec.shape))
        table.add_row(str(number), ", ".join(spec.names), shape, spec.dtype.name)
    return cut(table, len(entries) - limit)


def _rows(frame: FrameFacts, limit: int) -> Table:
    table = make_table("row", "parameter", "kind", "start", "span", "count", "bytes", names=0)
    for number, row in enumerate(islice(frame.row_facts(), limit)):
        fields = (row["start"], row["span"], row["count"], row["index_bytes"] + row["value_bytes"])
        table.add_row(str(number), str(row["parameter"]), row["kind"], *map(count, fields))
    return cut(table, len(frame.rows) - limit)
