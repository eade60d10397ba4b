"""`deltasync fetch`: a version of a store as a checkpoint, over the fewest bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deltasync.cli.stores import Config, KeyFile, StoreUrl, store_options
from deltasync.cli.terminal import AsJson, phases, print_json, print_written
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
    as_json: AsJson = False,
) -> None:
    """Write a version of a store as a checkpoint in safetensors.

    It comes over the fewest bytes. What is fetched is checked against the manifests, and what was
    written is read again.
    """
    from deltasync.delta.digests import digest_text
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.store.checkpoints import fetch_checkpoint

    options = store_options(config, key_file)
    with phases() as phase:
        found = fetch_checkpoint(
            url,
            out,
            to=to,
            base=None if base is None else Checkpoint(base),
            options=options,
            phase=phase,
        )
    if as_json:
        print_json({"out": str(out), **asdict(found), "digest": digest_text(found.digest)})
        return
    kinds = Counter(found.ways).items()
    ways = " + ".join(f"{number} {kind}" for kind, number in kinds) or "nothing"
    what = f"v{found.version}, "
    more = f"; fetched {ways}, {size(found.fetched_bytes)}"
    print_written(out, found.num_bytes, found.num_tensors, found.digest, what=what, more=more)
