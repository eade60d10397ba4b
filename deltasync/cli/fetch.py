"""`deltasync fetch`: a version of a store as a checkpoint, over the fewest bytes."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deltasync.cli.stores import Config, KeyFile, RunName, StoreUrl, store_options
from deltasync.cli.terminal import AsJson, phases, print_json, print_written, size

To = Annotated[
    str | None,
    typer.Option("--to", metavar="VERSION", help="Such as v9 or 9; the newest one by default."),
]
Out = Annotated[Path, typer.Option("--out", help="The new folder.", show_default=False)]


def fetch(
    url: StoreUrl,
    out: Out,
    to: To = None,
    base: Annotated[
        Path | None,
        typer.Option(help="A checkpoint of another version: only what has changed is fetched."),
    ] = None,
    run: RunName = None,
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
            to=_version(to),
            run=run,
            base=None if base is None else Checkpoint(base),
            options=options,
            phase=phase,
        )
    if as_json:
        print_json({"out": str(out), **asdict(found), "digest": digest_text(found.digest)})
        return
    ways = " + ".join(_grouped(found.ways)) or "nothing"
    what = f"v{found.version} of run {found.run}, "
    more = f"; fetched {ways}, {size(found.fetched_bytes)}"
    print_written(out, found.num_bytes, found.num_tensors, found.digest, what=what, more=more)


def _version(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"v?[0-9]{1,16}", text, re.ASCII):
        raise typer.BadParameter(f"{text!r} is not like v9", param_hint="--to")
    return int(text.removeprefix("v"))


def _grouped(ways: tuple[str, ...]) -> list[str]:
    """Such as ["1 anchor", "3 deltas"]."""
    counts = {kind: ways.count(kind) for kind in ways}
    return [f"{number} {kind}{'s' * (number > 1)}" for kind, number in counts.items()]
