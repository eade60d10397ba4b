"""`deltasync diff`: how two checkpoints differ, and the patch file between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deltasync.cli.terminal import (
    AsJson,
    FilePath,
    bar,
    count,
    cut,
    make_console,
    make_table,
    phases,
    print_json,
)
from deltasync.observe.units import percent, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deltasync.delta.sparsity import Sparsity
    from deltasync.files.patch_file import PatchSummary


Codec = Literal["none", "zstd", "gap", "block", "class"]
_SHOWN = 200  # layers


def diff(
    old: FilePath,
    new: FilePath,
    out: Annotated[
        Path | None, typer.Option(help="Write the patch that makes OLD bit-identical to NEW.")
    ] = None,
    codec: Annotated[Codec, typer.Option(help="How the patch becomes short.")] = "zstd",
    as_json: AsJson = False,
) -> None:
    """Show how two checkpoints differ, by layer, ULP and byte.

    OLD and NEW are safetensors files, or folders of them.
    """
    from deltasync.delta.sparsity import Sparsity
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.files.comparing import compare_checkpoints
    from deltasync.files.output import refuse_existing
    from deltasync.files.patch_file import write_patch

    if out is not None:
        refuse_existing(out)
    before, after, patch = Checkpoint(old), Checkpoint(new), None
    with phases(before.num_bytes) as phase:
        found = compare_checkpoints(before, after, encodings=False, advance=phase("comparing"))
        if out is not None:
            patch = write_patch(before, after, out, phase=phase, codec=codec)
    total = sum(found.values(), Sparsity())
    sparse = sum((4 + before.specs[name].dtype.item_size) * n.changed for name, n in found.items())
    sizes = {"dense": before.num_bytes, "int32 + value": sparse}
    if as_json:
        print_json(_as_json(found, total, sizes, patch))
        return
    console = make_console()
    changed = f"{count(total.changed)} of {count(total.numel)} elements changed"
    console.print(f"{changed} ({percent(total.density)}), in {len(found)} tensors")
    console.print(f"int32 + value: {size(sparse)} of {size(before.num_bytes)}")
    if total.changed:
        console.print(_by_layer(console, found))
        console.print(_steps(console, total))
    if patch is not None:
        console.print(f"{out}: {size(patch.num_bytes)}, apply it with deltasync apply")


def _layers(found: Mapping[str, Sparsity]) -> dict[str, Sparsity]:
    from deltasync.sync.stats import layer_of

    layers: dict[str, Sparsity] = {}
    for name, one in found.items():
        layer = layer_of(name)
        layers[layer] = layers[layer] + one if layer in layers else one
    return dict(sorted(layers.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts 10 after 9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _by_layer(console: Console, found: Mapping[str, Sparsity]) -> Table:
    layers = _layers(found)
    most = max(one.density for one in layers.values())
    table = make_table("layer", "elements", "changed", "density", "")
    for layer, one in islice(layers.items(), _SHOWN):
        drawn = bar(console, one.density / most)
        table.add_row(layer, count(one.numel), count(one.changed), percent(one.density), drawn)
    return cut(table, len(layers) - _SHOWN, "more layers: --json has all")


def _steps(console: Console, total: Sparsity) -> Table:
    """Steps in ULPs, by powers of two."""
    table = make_table("step in ULP", "changed", "share", "")
    for text, number in _step_groups(total).items():
        share = number / total.changed
        table.add_row(text, count(number), percent(share), bar(console, share))
    return table


def _step_groups(total: Sparsity) -> dict[str, int]:
    last = len(total.steps) - 1
    groups, low = {}, 1
    while low < last:
        high = min(2 * low, last)
        text = str(low) if high == low + 1 else f"{low} to {high - 1}"
        groups[text] = int(total.steps[low:high].sum())
        low = high
    groups[f"{last} and more"] = int(total.steps[last])
    return groups


def _as_json(
    found: Mapping[str, Sparsity],
    total: Sparsity,
    sizes: Mapping[str, int],
    patch: PatchSummary | None,
) -> dict[str, Any]:
    from deltasync.delta.digests import digest_text

    def counts(one: Sparsity) -> dict[str, Any]:
        return {"numel": one.numel, "changed": one.changed, "density": one.density}

    result = counts(total) | {
        "steps": total.steps.tolist(),
        "encodings": sizes,
        "layers": {name: counts(one) for name, one in _layers(found).items()},
        "tensors": {name: counts(one) for name, one in found.items()},
    }
    if patch is not None:
        digests = {"base": digest_text(patch.base), "digest": digest_text(patch.digest)}
        result["patch"] = {"bytes": patch.num_bytes, **digests}
    return result
