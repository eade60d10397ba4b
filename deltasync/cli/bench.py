"""`deltasync bench`: the time of a sync on this machine, compared with sending everything."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deltasync.cli.ending import FAILED, told

if TYPE_CHECKING:
    from deltasync.cli.probes.measuring import Measured, Sides

BYTES_AN_ELEMENT = 10  # of memory, at both ends together, rounded up
FEWEST_CHANGES = 100
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def bench(
    numel: Annotated[str, typer.Option(help="Number of bf16 elements in the model.")] = "64M",
    density: Annotated[float, typer.Option(help="Share of the elements that changes.")] = 0.01,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where both ends hold their weights.")
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time syncs of what changes, and compare with sending all of it.

    Both take turns, and every sync is verified. Other work on the machine blurs the times.
    """
    count = _count(numel)
    _check(count, density, device)
    from deltasync.errors import DeltaSyncError

    try:
        measured = _measure(count, density, device)
    except DeltaSyncError as error:
        raise told(error, FAILED) from None
    if as_json:
        print(json.dumps(asdict(measured)))
    else:
        _show(measured)


def _count(numel: str) -> int:
    """Parse a number such as "64M"."""
    found = re.fullmatch(r"([1-9]\d*)([KMG]?)", numel.upper(), flags=re.ASCII)
    if not found:
        raise typer.BadParameter(f"{numel!r} is not like 64M", param_hint="--numel")
    return int(found[1]) * _FACTORS[found[2]]


def _check(numel: int, density: float, device: str) -> None:
    """Refuse now what would fail later."""
    import torch

    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density} is not in (0, 1]", param_hint="--density")
    if numel * density < FEWEST_CHANGES:
        raise typer.BadParameter(f"changes fewer than {FEWEST_CHANGES}", param_hint="--density")
    if device == "cpu":
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    elif torch.cuda.is_available():
        room = torch.cuda.mem_get_info()[0]
    else:
        raise typer.BadParameter("torch sees no GPU; try deltasync doctor", param_hint="--device")
    if numel * BYTES_AN_ELEMENT > room:
        most = room // BYTES_AN_ELEMENT // 10**6
        raise typer.BadParameter(f"memory is enough for {most}M", param_hint="--numel")


def _measure(numel: int, density: float, device: str) -> Measured:
    from deltasync.cli.probes.measuring import NUM_STEPS, measure

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("syncing", total=NUM_STEPS)
        return measure(numel, density, device, lambda: progress.advance(task))


def _show(measured: Measured) -> None:
    console = Console(highlight=False)
    share = measured.nnz / measured.numel
    print(f"{measured.numel:,} bf16 elements on {measured.device}, {share:.2%} changed;", end=" ")
    print(f"{measured.link} between two processes")
    table = Table("", "what changed", "everything", "ratio", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("sent", *_cells(measured.payload_bytes, 1e-6, "MB"))
    table.add_row("sync", *_cells(measured.total_s, 1e3, "ms"))
    table.add_row("of it comparing", *_cells(measured.diff_s, 1e3, "ms"))
    table.add_row("of it the engine's pause", *_cells(measured.pause_s, 1e3, "ms"))
    console.print(table)
    print("Medians. Everything is the same sync with every chunk sent whole, digests included.")


def _cells(sides: Sides, factor: float, unit: str) -> tuple[str, str, str]:
    changed, everything = (_three_digits(factor * n) for n in (sides.changed, sides.everything))
    ratio = _three_digits(sides.everything / sides.changed)
    return f"{changed} {unit}", f"{everything} {unit}", f"{ratio}x"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
