"""`deltasync verify`: equality of two checkpoints, soundness of a store."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltasync.cli.ending import FAILED
from deltasync.cli.stores import Config, KeyFile, store_options
from deltasync.cli.terminal import (
    AsJson,
    count,
    cut,
    make_console,
    make_table,
    phases,
    print_json,
)
from deltasync.observe.units import size

if TYPE_CHECKING:
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.store.verifying import Verified

_SHOWN = 10  # tensors that differ


def verify(
    first: Annotated[str, typer.Argument(metavar="FIRST", show_default=False)],
    second: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    config: Config = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints bit for bit, or check a store.

    Exits with 1 if they differ, or if it is damaged. FIRST and SECOND are safetensors files, or
    folders of them. FIRST alone is the URL of a store: all of its manifests and objects are read,
    and each version is put together.
    """
    from deltasync.files.checkpoint import Checkpoint

    if second is None:
        if Path(first).exists() and not Path(first).is_dir():
            raise typer.BadParameter(f"{first} is no store: to compare checkpoints, give a second")
        _verify_store(first, config, key_file, as_json=as_json)
        return
    if config or key_file:
        raise typer.BadParameter("--config and --key-file are for a store: give one URL")
    if not _compare(Checkpoint(Path(first)), Checkpoint(second), as_json=as_json):
        raise typer.Exit(FAILED)


def _verify_store(
    url: str,
    config: list[str] | None,
    key_file: Path | None,
    *,
    as_json: bool,
) -> None:
    from deltasync.store.verifying import verify_run

    with phases(counts=True) as phase:
        found = verify_run(url, options=store_options(config, key_file), phase=phase)
    if as_json:
        print_json(asdict(found))
    else:
        _print_faults(found)
    if found.faults or len(found.proved) < found.versions:
        raise typer.Exit(FAILED)


def _print_faults(found: Verified) -> None:
    console = make_console()
    read = f"{size(found.num_bytes)} read"
    console.print(
        f"{count(len(found.proved))} of {count(found.versions)} versions are proved, "
        f"{count(len(found.faults))} faults, {read}"
    )
    if found.faults:
        table = make_table("version", "what", "why", names=3)
        for fault in found.faults:
            table.add_row(f"v{fault.version}", fault.what, fault.why)
        console.print(table)


def _compare(first: Checkpoint, second: Checkpoint, *, as_json: bool) -> bool:
    from deltasync.files.comparing import compare_checkpoints

    with phases(first.num_bytes) as phase:
        advance = phase("comparing")
        found = compare_checkpoints(first, second, encodings=False, advance=advance)
    different = {name: one.changed for name, one in found.items() if one.changed}
    numel = sum(one.numel for one in found.values())
    if as_json:
        print_json({"equal": not different, "numel": numel, "different": different})
    elif not different:
        made = f"{count(numel)} elements in {count(len(first.specs))} tensors"
        make_console().print(f"equal: {made}, bit for bit")
    else:
        _print_difference(different, numel)
    return not different


def _print_difference(different: dict[str, int], numel: int) -> None:
    console, total = make_console(), sum(different.values())
    console.print(
        f"different: {count(total)} of {count(numel)} elements, in {count(len(different))} tensors"
    )
    table = make_table("tensor", "different elements")
    for name, number in islice(different.items(), _SHOWN):
        table.add_row(name, count(number))
    console.print(cut(table, len(different) - _SHOWN, "more tensors: --json has all"))
