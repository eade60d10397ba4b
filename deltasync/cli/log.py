"""`deltasync log`: the versions of a run in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from deltasync.cli.stores import Config, KeyFile, StoreUrl, store_options
from deltasync.cli.terminal import make_console, make_table
from deltasync.observe.units import percent, size


def log(
    url: StoreUrl,
    limit: Annotated[
        int, typer.Option(min=0, help="How many versions, the newest first; 0 for all.")
    ] = 20,
    config: Config = None,
    key_file: KeyFile = None,
) -> None:
    """Show the versions of a run, and how each can be fetched.

    Also its size, and who wrote it when. Manifests are checked; objects are not read.
    """
    from deltasync.store.catalogue import Run

    store = Run.open(url, store_options(config, key_file))
    versions = store.versions()
    found = [store.published(version) for version in reversed(versions[-limit:])]
    entries = [one for one in found if one is not None]  # others were deleted meanwhile
    console = make_console()
    if entries:
        newest = entries[0].manifest
        console.print(
            f"run {newest.run}: {len(versions):,} versions, the newest is v{newest.version}"
        )
    table = make_table("version", "elements", "ways", "changed", "written", "by", names=3)
    for published in entries:
        manifest = published.manifest
        table.add_row(
            f"v{manifest.version}",
            f"{manifest.numel:,}",
            ", ".join(f"{way.kind} {size(way.num_bytes)}" for way in store.ways(published)),
            percent(manifest.nnz / manifest.numel),
            manifest.written_at.replace("T", " ").removesuffix("+00:00"),
            manifest.writer.partition(" ")[2],
        )
    console.print(table)
