"""`deltasync verify`: equality of two checkpoints, soundness of a patch file or of a store."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltasync.cli.ending import FAILED
from deltasync.cli.stores import Config, KeyFile, store_options
from deltasync.cli.terminal import file_argument, make_console, make_table, phases
from deltasync.observe.units import size

if TYPE_CHECKING:
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.store.verifying import Verified

_SHOWN = 10  # tensors that differ


def verify(
    first: Annotated[str, file_argument("FIRST")],
    second: Annotated[Path | None, file_argument("SECOND")] = None,
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
            _verify_store(first, config, key_file)
        return
    if config or key_file:
        raise typer.BadParameter("--config and --key-file are for a store: give one URL")
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


def _verify_store(url: str, config: list[str] | None, key_file: Path | None) -> None:
    from deltasync.store.verifying import verify_run

    with phases(counts=True) as phase:
        found = verify_run(url, options=store_options(config, key_file), phase=phase)
    _print_faults(found)
    if found.faults or len(found.proved) < found.versions:
        raise typer.Exit(FAILED)


def _print_faults(found: Verified) -> None:
    console = make_console()
    console.print(
        f"{len(found.proved):,} of {found.versions:,} versions are proved, "
        f"{len(found.faults):,} faults, {size(found.num_bytes)} read"
    )
    if found.faults:
        table = make_table("version", "what", "why", names=3)
        for fault in found.faults:
            table.add_row(f"v{fault.version}", fault.what, fault.why)
        console.print(table)


def _compare(first: Checkpoint, second: Checkpoint) -> bool:
    from deltasync.files.comparing import compare_checkpoints

    with phases(first.num_bytes) as phase:
        advance = phase("comparing")
        found = compare_checkpoints(first, second, encodings=False, advance=advance)
    different = {name: one.changed for name, one in found.items() if one.changed}
    numel = sum(one.numel for one in found.values())
    if different:
        _print_difference(different, numel)
        return False
    make_console().print(f"equal: {numel:,} elements in {len(found):,} tensors, bit for bit")
    return True


def _print_difference(different: dict[str, int], numel: int) -> None:
    console, total = make_console(), sum(different.values())
    console.print(f"different: {total:,} of {numel:,} elements, in {len(different):,} tensors")
    table = make_table("tensor", "different elements")
    for name, number in islice(different.items(), _SHOWN):
        table.add_row(name, f"{number:,}")
    console.print(table)
    if len(different) > _SHOWN:
        console.print(f"and {len(different) - _SHOWN:,} more tensors")
