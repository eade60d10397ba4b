"""`deltasync gc`: delete old versions of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from deltasync.cli.stores import Config, KeyFile, StoreUrl, store_options
from deltasync.cli.terminal import AsJson, count, make_console, phases, print_json
from deltasync.observe.units import size


def gc(
    url: StoreUrl,
    keep: Annotated[
        int,
        typer.Option(min=1, help="How many of the newest versions anybody can still fetch."),
    ] = 100,
    keep_hours: Annotated[
        float,
        typer.Option(
            min=0, help="What was written in so many hours stays: longer than a fetch or upload."
        ),
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, count only.")] = False,
    config: Config = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete old versions of a run, and uploads left unfinished.

    The newest versions stay, and the young ones, with what is needed to fetch them.
    """
    from deltasync.store.retention import gc as collect

    options = store_options(config, key_file)
    with phases(counts=True) as phase:
        found = collect(
            url,
            keep=keep,
            keep_s=keep_hours * 3600,
            dry_run=dry_run,
            options=options,
            advance=phase("deleting"),
        )
    if as_json:
        print_json({"dry_run": dry_run, **asdict(found)})
        return
    what = f"{count(found.versions)} versions, {count(found.objects)} objects"
    verb = "would delete" if dry_run else "deleted"
    left = "no version yet" if found.oldest is None else f"v{found.oldest} to v{found.newest} stay"
    console = make_console()
    console.print(f"{verb} {what}, {size(found.num_bytes)}; {left}")
    console.print(f"{count(found.unfinished)} of them of no version")
