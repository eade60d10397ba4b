"""`deltasync log`: the versions of a run in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltasync.cli.stores import Config, KeyFile, RunName, StoreUrl, store_options
from deltasync.cli.terminal import (
    AsJson,
    count,
    cut,
    make_console,
    make_table,
    percent,
    phases,
    print_json,
    size,
)

if TYPE_CHECKING:
    from deltasync.store.history import Entry, History


def log(
    url: StoreUrl,
    limit: Annotated[
        int, typer.Option(min=0, help="How many versions, the newest first; 0 for all.")
    ] = 20,
    run: RunName = None,
    config: Config = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the versions of a run, and how each can be fetched.

    Also its size, and who wrote it when. Manifests are checked, and that each names the one before;
    objects are not read.
    """
    from deltasync.store.history import history_of

    options = store_options(config, key_file)
    with phases(limit, counts=True) as phase:
        found = history_of(url, run, limit=limit or None, options=options, advance=phase("reading"))
    if as_json:
        print_json(_as_json(found))
        return
    console = make_console()
    if not found.entries:
        console.print(f"run {found.run}: no version yet")
        return
    numel = count(found.entries[0].manifest.numel)
    console.print(f"run {found.run}: v{found.entries[0].manifest.version}, {numel} elements")
    table = make_table("version", "ways", "changed", "codecs", "written", "by", names=2)
    for entry in found.entries:
        written = entry.manifest.written_at.replace("T", " ").removesuffix("+00:00")
        table.add_row(
            f"v{entry.manifest.version}",
            ", ".join(_way_text(entry, number) for number in range(len(entry.ways))),
            percent(entry.density),
            _codecs_text(entry),
            written,
            entry.manifest.writer.partition(" ")[2],
        )
    console.print(cut(table, found.older, "older versions: --limit 0 shows all"))


def _way_text(entry: Entry, number: int) -> str:
    way = entry.ways[number]
    base = "" if way.base is None or way.kind == "delta" else f" from v{way.base}"
    return f"{way.kind}{base} {size(way.num_bytes)}"


def _codecs_text(entry: Entry) -> str:
    """Shares of the delta's payload by codec."""
    delta = next((way for way in entry.ways if way.kind == "delta"), None)
    total = 0 if delta is None else sum(delta.codecs.values())
    if delta is None or not total:
        return ""
    ordered = sorted(delta.codecs.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {percent(num_bytes / total)}" for name, num_bytes in ordered)


def _as_json(found: History) -> dict[str, Any]:
    return {
        "run": found.run,
        "older": found.older,
        "versions": [_entry_json(entry) for entry in found.entries],
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    writer, _, name = manifest.writer.partition(" ")
    return {
        "version": manifest.version,
        "parent": None if manifest.parent is None else manifest.parent.version,
        "digest": manifest.digest,
        "layout_hash": manifest.layout_hash,
        "numel": manifest.numel,
        "nnz": manifest.nnz,
        "density": entry.density,
        "writer": writer,
        "writer_name": name,
        "written_at": manifest.written_at,
        "ways": [
            {
                "kind": way.kind,
                "base": way.base,
                "bytes": way.num_bytes,
                "files": len(way.files),
                "codecs": dict(way.codecs),
            }
            for way in entry.ways
        ],
    }
