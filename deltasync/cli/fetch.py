"""`deltasync fetch`: a version of a store as a checkpoint, over the fewest bytes."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltasync.cli.stores import Config, KeyFile, RunName, StoreUrl, store_options
from deltasync.cli.terminal import AsJson, count, make_console, phases, print_json, size

if TYPE_CHECKING:
    from deltasync.store.objects import StoreOptions

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
    write(url, out, to, base, run, options=store_options(config, key_file), as_json=as_json)


def write(
    url: str,
    out: Path,
    to: str | None,
    base: Path | None,
    run: str | None,
    *,
    options: StoreOptions,
    as_json: bool,
) -> None:
    """Write the checkpoint and report it."""
    from deltasync.delta.digests import digest_text
    from deltasync.files.checkpoint import Checkpoint
    from deltasync.store.checkpoints import fetch_checkpoint

    version = _version(to)
    with phases() as phase:
        found = fetch_checkpoint(
            url,
            out,
            to=version,
            run=run,
            base=None if base is None else Checkpoint(base),
            options=options,
            phase=phase,
        )
    digest = digest_text(found.digest)
    if as_json:
        print_json({"out": str(out), **asdict(found), "digest": digest})
        return
    made = f"{size(found.num_bytes)} in {count(found.num_tensors)} tensors"
    ways = " + ".join(_grouped(found.ways)) or "nothing"
    make_console().print(
        f"{out}: v{found.version} of run {found.run}, {made}, state digest {digest}; fetched "
        f"{ways}, {size(found.fetched_bytes)}",
        soft_wrap=True,
    )


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
