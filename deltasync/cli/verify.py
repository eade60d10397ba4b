"""`deltasync verify`: equality of two checkpoints, soundness of a patch file or of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from deltasync.cli.ending import FAILED
from deltasync.cli.stores import Config, KeyFile, RunName, store_options
from deltasync.cli.terminal import file_argument, make_console, make_table, phases
from deltasync.observe.units import size

if TYPE_CHECKING:
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.files.comparing import Equality
    from deltasync.store.verifying import Verified

_SHOWN = 10  # elements that differ


def verify(
    first: Annotated[str, file_argument("FIRST")],
    second: Annotated[Path | None, file_argument("SECOND")] = None,
    run: RunName = None,
    config: Config = None,
    key_file: KeyFile = None,
) -> None:
    """Compare two checkpoints bit for bit, or check a patch or a store.

    Exits with 1 if they differ, or if it is damaged. FIRST and SECOND are safetensors files, or
    folders of them. FIRST alone is a patch file, whose first damaged frame is named, or the URL of
    a store: all of its manifests and objects are read, and each version is put together.
    """
    from deltasync.files.checkpoint import Checkpoint

    if second is None:
        if Path(first).exists() and not Path(first).is_dir():
            _verify_frames(Path(first))
        else:
            _verify_store(first, run, config, key_file)
        return
    if run or config or key_file:
        raise typer.BadParameter("--run, --config and --key-file are for a store: give one URL")
    if not _compare(Checkpoint(Path(first)), Checkpoint(second)):
        raise typer.Exit(FAILED)


def _verify_frames(path: Path) -> None:
    from deltasync.files.frame_check import FrameCheck

    if path.suffix == ".safetensors":
        raise typer.BadParameter(f"{path} is a checkpoint; give a second one")
    check, console = FrameCheck(path), make_console()
    frames = f"{check.num_frames:,} sound frames"
    console.print(f"patch file, {size(check.num_bytes)}, {frames}", soft_wrap=True)
    if (fault := check.fault) is not None:
        where = f"damaged frame at byte {fault.offset:,}, rule {fault.rules}"
        console.print(f"{where}: {fault.error}: {fault.reason}", style="red", soft_wrap=True)
        raise typer.Exit(FAILED)


def _verify_store(
    url: str, run: str | None, config: list[str] | None, key_file: Path | None
) -> None:
    from deltasync.store.verifying import verify_run

    with phases(counts=True) as phase:
        found = verify_run(url, run, options=store_options(config, key_file), phase=phase)
    _print_faults(found)
    if found.faults or len(found.proved) < found.versions:
        raise typer.Exit(FAILED)


def _print_faults(found: Verified) -> None:
    console = make_console()
    console.print(
        f"run {found.run}: {len(found.proved):,} of {found.versions:,} versions are "
        f"proved, {len(found.faults):,} faults, {size(found.num_bytes)} read"
    )
    if found.faults:
        table = make_table("version", "what", "why", names=3)
        for fault in found.faults:
            table.add_row(f"v{fault.version}", fault.what, fault.why)
        console.print(table)


def _compare(first: Checkpoint, second: Checkpoint) -> bool:
    from deltasync.files.comparing import compare_bits

    with phases(first.num_bytes) as phase:
        found = compare_bits(first, second, limit=_SHOWN, advance=phase("comparing"))
    if found.different:
        _print_difference(found)
        return False
    made = f"{found.numel:,} elements in {len(first.specs):,} tensors"
    make_console().print(f"equal: {made}, bit for bit")
    return True


def _print_difference(found: Equality) -> None:
    console = make_console()
    number = sum(found.different.values())
    console.print(
        f"different: {number:,} of {found.numel:,} elements, in {len(found.different):,} tensors"
    )
    if not found.first:
        return
    table = make_table("tensor", "index", "first", "second", names=2)
    for one in found.first:
        index = f"[{', '.join(map(str, one.index))}]"
        table.add_row(one.name, index, *(Text("\n".join(texts)) for texts in (one.old, one.new)))
    console.print(table)
    if number > len(found.first):
        console.print(f"and {number - len(found.first):,} more")
