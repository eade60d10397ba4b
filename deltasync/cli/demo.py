"""`deltasync demo`: reinforcement learning in two processes, with deltasync between them."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltasync.cli.ending import FAILED, report


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of GRPO.")] = 15,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed.")] = 0,
    lr: Annotated[
        float,
        typer.Option(help="Learning rate of GRPO; 1e-6 is usual, 1e-4 learns within 300 steps."),
    ] = 1e-6,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for records, a run log, and first and last weights."),
    ] = None,
    quick: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Train a small policy by GRPO, with rollouts in another process.

    Only the weights that changed travel between the two, after every optimizer step.
    """
    from deltasync.demo.report import Report, print_summary, write_files
    from deltasync.demo.trainer import DemoConfig, run
    from deltasync.errors import DeltaSyncError
    from deltasync.files.output import write_output

    if not (math.isfinite(lr) and lr > 0):
        raise typer.BadParameter(f"{lr} is not above 0", param_hint="--lr")
    if out is not None and not find_spec("safetensors"):
        raise typer.BadParameter("needs pip install safetensors", param_hint="--out")
    log = None if out is None else out / "run.jsonl"
    if out is not None and log is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_output(log, b"")
    config = (DemoConfig.quick if quick else DemoConfig)(
        steps=steps, seed=seed, learning_rate=lr, log=log
    )
    console = Console(highlight=False)
    shown = Report(console)
    try:
        summary = run(config, shown)
    except DeltaSyncError as error:
        raise typer.Exit(report(error, FAILED)) from None
    print_summary(console, summary, shown.records)
    if out is not None:
        write_files(out, shown, summary)
    if not summary.bit_identical:
        raise typer.Exit(FAILED)
