"""`deltasync relay`: receive over a thin link once, and send to a region's receivers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from deltasync.cli.live import Lanes, links_to
from deltasync.cli.signals import tell
from deltasync.cli.terminal import Secret, printable, secret_of, size

if TYPE_CHECKING:
    from deltasync.sync.relay.relay import Relay
    from deltasync.sync.stats import SyncStats

Connect: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="The trainer, or another relay: gloo://HOST:PORT, nixl://HOST:PORT or "
        "shared_memory:PATH.",
        show_default=False,
    ),
]
Serve: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Where the region's receivers connect, in the same forms; port 0 chooses a free one.",
        show_default=False,
    ),
]


def relay(
    connect: Connect,
    serve: Serve,
    lane: Lanes = None,
    name: Annotated[
        str, typer.Option(help="Name of this engine.", show_default="relay, host and a number")
    ] = "",
    memory: Annotated[
        Path | None,
        typer.Option(help="A file that keeps the model: a restarted relay joins by its digest."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=1e6,
            help="Seconds to forward a version; choose less than the trainer's timeout.",
        ),
    ] = 20.0,
    compress: Annotated[bool, typer.Option("--compress", help="Send with zstd.")] = False,
    secret: Secret = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, nothing else.")
    ] = False,
) -> None:
    """Forward each version of a trainer to the receivers of a region, until a signal ends it.

    The model takes host memory once. Receivers keep serving what they hold when the relay ends.
    """
    from deltasync.errors import ConfigError
    from deltasync.sync.relay.relay import Relay
    from deltasync.transports.address import Address

    above, below = Address.parse(connect), Address.parse(serve)
    if above == below:
        raise ConfigError(f"--connect and --serve are both {connect}: a relay cannot feed itself")
    links = links_to([connect, *(lane or [])], secret)
    downstream = below.sender(secret=secret_of(secret))
    made = Relay(
        links[0],
        downstream,
        lanes=links[1:],
        name=name or f"relay-{socket.gethostname()}-{os.getpid()}",
        memory=memory,
        timeout_s=timeout,
        compression="zstd" if compress else "none",
    )
    with made as running:
        address = Address.of(downstream)
        _say({"event": "serving", "name": running.name, "address": str(address)}, as_json=as_json)
        _run(running, as_json=as_json)


def _run(running: Relay, *, as_json: bool) -> None:
    version, said = None, ""
    while True:
        stats = running.forward(timeout_s=1.0)
        if running.version not in (version, None):
            version = running.version
            _say({"event": "holds", "version": version}, as_json=as_json)
        if stats is not None:
            _say(_told(stats), as_json=as_json)
        error = running.last_error
        line = "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"
        if line and line != said:
            tell(printable(line))
        said = line


def _told(stats: SyncStats) -> dict[str, Any]:
    return {
        "event": "forwarded",
        "version": stats.version,
        "base_version": stats.base_version,
        "receivers": stats.receivers,
        "joined": stats.joined,
        "full_synced": stats.full_synced,
        "lost": stats.lost,
        "payload_bytes": stats.payload_bytes + stats.joined_bytes,
        "seconds": round(stats.total_s, 6),
    }


def _say(event: dict[str, Any], *, as_json: bool) -> None:
    """Print an event at once: a reader waits for it."""
    import json

    if as_json:
        print(json.dumps(event), flush=True)
        return
    match event["event"]:
        case "serving":
            line = f"{event['name']} serves at {event['address']}"
        case "holds":
            line = f"holds v{event['version']}"
        case _:
            to = f"{event['receivers']} receivers ({event['joined']} joined)"
            sent = f"{size(event['payload_bytes'])} in {event['seconds']:.3g} s"
            lost = "".join(f"; lost {who}: {why}" for who, why in event["lost"].items())
            line = f"forwarded v{event['version']} to {to}, {sent}{lost}"
    print(printable(line), flush=True)
