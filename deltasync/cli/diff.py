"""`deltasync diff`: how two checkpoints differ, and the patch file between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltasync.cli.terminal import file_argument, make_console, make_table, phases
from deltasync.observe.units import percent, size

if TYPE_CHECKING:
    from rich.table import Table

    from deltasync.files.sparsity import Sparsity


def diff(
    old: Annotated[Path, file_argument("OLD")],
    new: Annotated[Path, file_argument("NEW")],
    out: Annotated[
        Path | None, typer.Option(help="Write the patch that makes OLD bit-identical to NEW.")
    ] = None,
) -> None:
    """Show how many elements of two checkpoints differ, by layer.

    OLD and NEW are safetensors files, or folders of them.
    """
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.files.comparing import compare_checkpoints
    from deltasync.files.output import refuse_existing
    from deltasync.files.patch_file import write_patch
    from deltasync.files.sparsity import Sparsity

    if out is not None:
        refuse_existing(out)
    before, after, patch = Checkpoint(old), Checkpoint(new), None
    with phases(before.num_bytes) as phase:
        tensors = compare_checkpoints(before, after, encodings=False, advance=phase("comparing"))
        if out is not None:
            patch = write_patch(before, after, out, phase=phase)
    total = sum(tensors.values(), Sparsity())
    console = make_console()
    changed = f"{total.changed:,} of {total.numel:,} elements changed"
    console.print(f"{changed} ({percent(total.density)}), in {len(tensors)} tensors")
    sparse = sum(
        (4 + before.specs[name].dtype.item_size) * n.changed for name, n in tensors.items()
    )
    console.print(f"int32 + value: {size(sparse)} of {size(before.num_bytes)}")
    if total.changed:
        console.print(_by_layer(tensors))
    if patch is not None:
        console.print(f"{out}: {size(patch.num_bytes)}, apply it with deltasync apply")


def _by_layer(tensors: Mapping[str, Sparsity]) -> Table:
    layers: dict[str, Sparsity] = {}
    for name, one in tensors.items():
        layer = _layer_of(name)
        layers[layer] = layers[layer] + one if layer in layers else one
    table = make_table("layer", "elements", "changed", "density")
    for layer in sorted(layers, key=_natural):
        one = layers[layer]
        table.add_row(layer, f"{one.numel:,}", f"{one.changed:,}", percent(one.density))
    return table


def _layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the first number, or to the last dot."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else name.rpartition(".")[0] or name


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts 10 after 9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
