"""`deltasync demo`: reinforcement learning in two processes, with deltasync between them."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from deltasync.cli.ending import FAILED, told

if TYPE_CHECKING:
    from deltasync.demo.trainer import DemoConfig


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of GRPO.")] = 15,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed.")] = 0,
    lr: Annotated[
        float,
        typer.Option(help="Learning rate of GRPO; 1e-6 is usual, 1e-4 learns within 300 steps."),
    ] = 1e-6,
    transport: Annotated[
        Literal["shared_memory", "gloo"], typer.Option(help="Transport of the weights.")
    ] = "shared_memory",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per version, nothing else.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for records, a run log, and first and last weights."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Folder to which each version is published, for log, fetch and export."),
    ] = None,
    quick: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Train a small policy by GRPO, with rollouts in another process.

    Only the weights that changed travel between the two, after every optimizer step.
    """
    _check(lr, out)
    _check_store(store)
    from deltasync.demo.trainer import DemoConfig
    from deltasync.errors import DeltaSyncError
    from deltasync.files.output import write_output

    make_config = DemoConfig.quick if quick else DemoConfig
    log = None if out is None else out / "run.jsonl"
    if log is not None:
        write_output(log, b"")
    config = make_config(
        steps=steps, seed=seed, learning_rate=lr, transport=transport, store=store, log=log
    )
    try:
        bit_identical = _run(config, as_json=as_json, out=out)
    except DeltaSyncError as error:
        raise told(error, FAILED) from None
    if not bit_identical:
        raise typer.Exit(FAILED)


def _check(lr: float, out: Path | None) -> None:
    """Refuse now what would fail minutes later."""
    if not (math.isfinite(lr) and lr > 0):
        raise typer.BadParameter(f"{lr} is not above 0", param_hint="--lr")
    if out is None:
        return
    if not find_spec("safetensors"):
        raise typer.BadParameter("needs pip install safetensors", param_hint="--out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def _check_store(store: Path | None) -> None:
    if store is not None and not find_spec("obstore"):
        raise typer.BadParameter("needs pip install obstore", param_hint="--store")


def _run(config: DemoConfig, *, as_json: bool, out: Path | None) -> bool:
    """Run and report. Returns whether both processes ended with the same bytes."""
    from deltasync.demo.report import Report, print_summary, write_files
    from deltasync.demo.trainer import run

    console = Console(stderr=as_json, highlight=False)
    report = Report(console, as_json=as_json)
    summary = run(config, report)
    print_summary(console, summary, report.records)
    if out is not None:
        write_files(out, report, summary)
    return summary.bit_identical
