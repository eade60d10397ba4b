"""`deltasync fetch`: a version of a store as a checkpoint, over the fewest bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from deltasync.cli.stores import Config, KeyFile, StoreUrl, store_options
from deltasync.cli.terminal import phases, print_written
from deltasync.observe.units import size


def fetch(
    url: StoreUrl,
    out: Annotated[Path, typer.Option(help="The new folder.", show_default=False)],
    to: Annotated[
        int | None,
        typer.Option(min=1, metavar="VERSION", help="By default the newest one."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="A checkpoint of another version: only what has changed is fetched."),
    ] = None,
    config: Config = None,
    key_file: KeyFile = None,
) -> None:
    """Write a version of a store as a checkpoint in safetensors.

    It comes over the fewest bytes. What is fetched is checked against the manifests, and what was
    written is read again.
    """
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.store.checkpoints import fetch_checkpoint

    options = store_options(config, key_file)
    with phases() as phase:
        done = fetch_checkpoint(
            url,
            out,
            to=to,
            base=None if base is None else Checkpoint(base),
            options=options,
            phase=phase,
        )
    kinds = Counter(done.ways).items()
    ways = " + ".join(f"{number} {kind}" for kind, number in kinds) or "nothing"
    what = f"v{done.version}, "
    more = f"; fetched {ways}, {size(done.fetched_bytes)}"
    print_written(out, done.num_bytes, done.num_tensors, done.digest, what=what, more=more)
