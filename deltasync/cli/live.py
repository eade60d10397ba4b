"""What commands share that connect to a living sender or relay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from deltasync.cli.terminal import count, make_console, phases, print_json, secret_of, size

if TYPE_CHECKING:
    from deltasync.transports.base import ReceiveTransport

Lanes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--lane", metavar="ADDRESS", help="Of the trainer's ranks 1, 2, ...; repeatable."),
]


def links_to(addresses: list[str], secret: Path | None) -> list[ReceiveTransport]:
    """Receivers' ends, in host memory. Raises ConfigError, BadParameter."""
    import torch

    from deltasync.transports.address import Address

    parsed, shared = [Address.parse(text) for text in addresses], secret_of(secret)
    return [address.receiver(torch.device("cpu"), secret=shared) for address in parsed]


def write_live(
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
    from deltasync.files.frame_file import refuse_existing
    from deltasync.sync.receiver import WeightReceiver
    from deltasync.sync.target.copied import CopiedTarget

    refuse_existing(out)
    links = links_to([connect, *lanes], secret)
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
