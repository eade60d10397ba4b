"""`deltasync log`: the versions of a run in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltasync.cli.stores import Config, KeyFile, StoreUrl, store_options
from deltasync.cli.terminal import (
    AsJson,
    count,
    cut,
    make_console,
    make_table,
    phases,
    print_json,
)
from deltasync.observe.units import percent, size

if TYPE_CHECKING:
    from deltasync.store.manifest import Manifest, Way


def log(
    url: StoreUrl,
    limit: Annotated[
        int, typer.Option(min=0, help="How many versions, the newest first; 0 for all.")
    ] = 20,
    config: Config = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the versions of a run, and how each can be fetched.

    Also its size, and who wrote it when. Manifests are checked; objects are not read.
    """
    from deltasync.store.catalogue import Run

    found = Run.open(url, store_options(config, key_file))
    versions = found.versions()
    with phases(limit, counts=True) as phase:
        advance = phase("reading")
        entries: list[tuple[Manifest, list[Way]]] = []
        for version in reversed(versions[-limit:]):
            if (published := found.published(version)) is not None:  # else deleted meanwhile
                entries.append((published.manifest, found.ways(published)))
            advance(1)
    older = len(versions) - len(entries)
    if as_json:
        shown = [_entry_json(*entry) for entry in entries]
        print_json({"older": older, "versions": shown})
        return
    console = make_console()
    if entries:
        newest, _ = entries[0]
        console.print(f"run {newest.run}: v{newest.version}, {count(newest.numel)} elements")
    table = make_table("version", "ways", "changed", "written", "by", names=2)
    for manifest, ways in entries:
        table.add_row(
            f"v{manifest.version}",
            ", ".join(f"{way.kind} {size(way.num_bytes)}" for way in ways),
            percent(manifest.nnz / manifest.numel),
            manifest.written_at.replace("T", " ").removesuffix("+00:00"),
            manifest.writer.partition(" ")[2],
        )
    console.print(cut(table, older, "older versions: --limit 0 shows all"))


def _entry_json(manifest: Manifest, ways: list[Way]) -> dict[str, Any]:
    kept = ("run", "version", "digest", "layout_hash", "numel", "nnz", "writer", "written_at")
    found = {name: getattr(manifest, name) for name in kept}
    found["ways"] = [{"kind": way.kind, "bytes": way.num_bytes} for way in ways]
    return found
