"""`deltasync log`: the versions of a run in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from deltasync.cli.stores import Config, KeyFile, RunName, StoreUrl, store_options
from deltasync.cli.terminal import make_console, make_table
from deltasync.observe.units import percent, size


def log(
    url: StoreUrl,
    limit: Annotated[
        int, typer.Option(min=0, help="How many versions, the newest first; 0 for all.")
    ] = 20,
    run: RunName = None,
    config: Config = None,
    key_file: KeyFile = None,
) -> None:
    """Show the versions of a run, and how each can be fetched.

    Also its size, and who wrote it when. Manifests are checked; objects are not read.
    """
    from deltasync.store.catalogue import Run

    store = Run.open(url, run, store_options(config, key_file))
    versions = store.versions()
    console = make_console()
    if not versions:
        console.print(f"run {store.name}: no version yet")
        return
    table = make_table("version", "elements", "ways", "changed", "written", "by", names=3)
    for version in reversed(versions[-limit:]):
        if (published := store.published(version)) is None:  # deleted meanwhile
            continue
        manifest = published.manifest
        table.add_row(
            f"v{version}",
            f"{manifest.numel:,}",
            ", ".join(f"{way.kind} {size(way.num_bytes)}" for way in store.ways(published)),
            percent(manifest.nnz / manifest.numel),
            manifest.written_at.replace("T", " ").removesuffix("+00:00"),
            manifest.writer.partition(" ")[2],
        )
    console.print(f"run {store.name}: {len(versions):,} versions, the newest is v{versions[-1]}")
    console.print(table)
