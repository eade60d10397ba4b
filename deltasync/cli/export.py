"""`deltasync export`: a version as a checkpoint that restores a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltasync.cli.fetch import Out, To, write
from deltasync.cli.stores import Config, KeyFile, RunName, store_options
from deltasync.cli.terminal import (
    AsJson,
    Secret,
    count,
    make_console,
    phases,
    print_json,
    size,
)

if TYPE_CHECKING:
    from deltasync.transports.base import ReceiveTransport


def export(
    out: Out,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", show_default=False, help="A folder, s3://bucket/prefix, ...; of a run."
        ),
    ] = None,
    to: To = None,
    run: RunName = None,
    config: Config = None,
    key_file: KeyFile = None,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Instead of URL: a sender, gloo://HOST:PORT, nixl://HOST:PORT or "
            "shared_memory:PATH.",
        ),
    ] = None,
    lane: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Of the trainer's ranks 1, 2, ...; repeatable."),
    ] = None,
    name: Annotated[
        str, typer.Option(help="With --connect: name of this engine.", show_default="export-NUMBER")
    ] = "",
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, max=1e6, help="With --connect: seconds to wait for the next version."
        ),
    ] = 600.0,
    secret: Secret = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a checkpoint that restores a trainer.

    It comes from a store, or with --connect from a living sender, which answers when it sends next.
    Tensors are bit for bit what the trainer had, in the dtypes that it sent.
    """
    _check_one_origin(url, connect, of_store=(to, run, config, key_file), of_live=(lane, secret))
    if connect is not None:
        _write_live(
            connect, lane or [], out, name=name, timeout_s=timeout, secret=secret, as_json=as_json
        )
    elif url is not None:
        write(url, out, to, None, run, options=store_options(config, key_file), as_json=as_json)


def _check_one_origin(
    url: str | None,
    connect: str | None,
    *,
    of_store: tuple[str | list[str] | Path | None, ...],
    of_live: tuple[list[str] | Path | None, ...],
) -> None:
    """Raise BadParameter unless the options belong to one origin, and there is one."""
    if (url is None) == (connect is None):
        raise typer.BadParameter("give a store's URL, or --connect ADDRESS", param_hint="URL")
    if any(of_store if connect is not None else of_live):
        other = "a store's URL" if connect is not None else "--connect"
        raise typer.BadParameter(f"options that belong to {other} were given too")


def _write_live(
    connect: str,
    lanes: list[str],
    out: Path,
    *,
    name: str,
    timeout_s: float,
    secret: Path | None,
    as_json: bool,
) -> None:
    """Join, receive one version, write it as a checkpoint, and report it."""
    from deltasync.delta.digests import digest_text
    from deltasync.files.export import export_weights
    from deltasync.files.output import refuse_existing
    from deltasync.sync.receiver import WeightReceiver
    from deltasync.sync.target.copied import CopiedTarget

    refuse_existing(out)
    links = _links_to([connect, *lanes], secret)
    target, engine = CopiedTarget(), name or f"export-{os.getpid()}"
    with WeightReceiver(target, links[0], lanes=links[1:], engine=engine) as receiver:
        receiver.receive_weights(timeout_s=timeout_s)
    with phases() as phase:
        num_bytes = sum(tensor.nbytes for tensor in target.tensors.values())
        done = export_weights(receiver, out, phase=lambda told: phase(told, num_bytes))
    if as_json:
        told = {"version": done.version, "stream_id": done.stream_id, "num_bytes": done.num_bytes}
        print_json({"out": str(out), "digest": digest_text(done.digest), **told})
        return
    made = f"v{done.version}, {size(done.num_bytes)} in {count(done.num_tensors)} tensors"
    make_console().print(f"{out}: {made}, state digest {digest_text(done.digest)}", soft_wrap=True)


def _links_to(addresses: list[str], secret: Path | None) -> list[ReceiveTransport]:
    """Receivers' ends, in host memory. Raises ConfigError."""
    import torch

    from deltasync.config import read_secret
    from deltasync.transports.address import Address

    parsed = [Address.parse(text) for text in addresses]
    shared = None if secret is None else read_secret(secret)
    return [address.receiver(torch.device("cpu"), secret=shared) for address in parsed]
