"""`deltasync export`: what a living sender sends next, as a checkpoint that restores a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltasync.cli.fetch import Out
from deltasync.cli.terminal import AsJson, Secret, phases, print_json, print_written

if TYPE_CHECKING:
    from deltasync.transports.base import ReceiveTransport


def export(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            show_default=False,
            help="Of a sender: gloo://HOST:PORT, nixl://HOST:PORT or shared_memory:PATH.",
        ),
    ],
    out: Out,
    lane: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Of the trainer's ranks 1, 2, ...; repeatable."),
    ] = None,
    name: Annotated[
        str, typer.Option(help="Name of this engine.", show_default="export-NUMBER")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, max=1e6, help="Seconds to wait for the next version.")
    ] = 600.0,
    secret: Secret = None,
    as_json: AsJson = False,
) -> None:
    """Write what a living sender sends next as a checkpoint.

    Tensors are bit for bit what the trainer has, in the dtypes that it sends. Versions in a store
    are written by deltasync fetch.
    """
    from deltasync.delta.digests import digest_text
    from deltasync.files.export import export_weights
    from deltasync.files.output import refuse_existing
    from deltasync.sync.receiver import WeightReceiver
    from deltasync.sync.target.copied import CopiedTarget

    refuse_existing(out)
    links = _links_to([address, *(lane or [])], secret)
    target, engine = CopiedTarget(), name or f"export-{os.getpid()}"
    with WeightReceiver(target, links[0], lanes=links[1:], engine=engine) as receiver:
        receiver.receive_weights(timeout_s=timeout)
    with phases() as phase:
        num_bytes = sum(tensor.nbytes for tensor in target.tensors.values())
        done = export_weights(receiver, out, phase=lambda told: phase(told, num_bytes))
    if as_json:
        told = {"version": done.version, "stream_id": done.stream_id, "num_bytes": done.num_bytes}
        print_json({"out": str(out), "digest": digest_text(done.digest), **told})
        return
    print_written(out, done.num_bytes, done.num_tensors, done.digest, what=f"v{done.version}, ")


def _links_to(addresses: list[str], secret: Path | None) -> list[ReceiveTransport]:
    """Receivers' ends, in host memory. Raises ConfigError."""
    import torch

    from deltasync.config import read_secret
    from deltasync.transports.address import Address

    parsed = [Address.parse(text) for text in addresses]
    shared = None if secret is None else read_secret(secret)
    return [address.receiver(torch.device("cpu"), secret=shared) for address in parsed]
