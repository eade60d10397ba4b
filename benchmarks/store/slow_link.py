"""`python -m benchmarks.store.slow_link run`: follow large objects over a slow link, with restarts.

A trainer publishes two versions to an S3 server, each of which is one anchor, and is killed once in
each. A reader follows them through a link with a token bucket. It is killed while it fetches, twice
in each version, and goes on in the same spool. Prints what came.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.processes import Told
from benchmarks.store.runner import KEYS, Link, started
from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreReceiver, StoreSender
from deltasync.store.objects import StoreOptions

_COLUMNS, _BLOCK_ROWS = 4096, 1024
_VERSIONS, _KILLS_AT = (1, 2), (0.3, 0.7)
_MODULE, _URL = "benchmarks.store.slow_link", "s3://bench/slow"
app = typer.Typer()


def model_of(num_bytes: int) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    weight = torch.empty(num_bytes // 2 // _COLUMNS, _COLUMNS, dtype=torch.bfloat16)
    model.weight = nn.Parameter(weight, requires_grad=False)
    return model


def blocks(weight: Tensor, version: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(a part of the weight's bits, what it is in a version)."""
    bits = weight.view(torch.int16)
    for start in range(0, len(bits), _BLOCK_ROWS):
        here, random = bits[start : start + _BLOCK_ROWS], torch.Generator()
        random.manual_seed(version * 1_000_000 + start)
        made = torch.randint(-(1 << 15), 1 << 15, here.shape, generator=random, dtype=torch.int16)
        yield here, made


def _store(endpoint: str) -> StoreOptions:
    return StoreOptions(config={"endpoint": endpoint, **KEYS}, timeout_s=600)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


@app.command()
def publish(endpoint: str, num_bytes: int, version: int) -> None:
    """Publish a version, as a trainer that was started again does."""
    model = model_of(num_bytes)
    for here, made in blocks(model.weight, version):
        here.copy_(made)
    options = SenderOptions(stream_id="run")
    sender = StoreSender(ModuleSource(model), _URL, options=options, store=_store(endpoint))
    _say(sender.publish().version)


@app.command()
def follow(endpoint: str, spool: Path, num_bytes: int, version: int) -> None:
    """Follow the run until a version is there. Prints shares, and at last whether it is right."""
    engine = model_of(num_bytes)
    receiver = StoreReceiver(
        ModuleTarget(engine), _URL, run="run", store=_store(endpoint), spool=spool
    )
    progress = receiver.progress
    progress.advanced = lambda _: _say(progress.fetched_bytes / progress.total_bytes)
    with receiver, receiver.follow() as follower:
        while receiver.version != version:
            if follower.wait_staged(timeout_s=10):
                follower.commit()
    is_equal = all(torch.equal(here, made) for here, made in blocks(engine.weight, version))
    _say("equal" if is_equal else "WRONG")


@app.command()
def run(
    num_bytes: Annotated[int, typer.Option(help="Of a version.")] = 2_000_000_000,
    mbit_s: Annotated[float, typer.Option(help="Of the link.")] = 320.0,
    folder: Annotated[Path | None, typer.Option(help="Where the spool lies.")] = None,
) -> None:
    """Run both ends, kill and restart them, and print how much came."""
    began = time.monotonic()
    with ExitStack() as stack:
        spool = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        slow = Link(stack)
        fast = slow.beside(stack)
        slow.set(mbit_s * 1e6)
        outcomes, kills = [], 0
        for version in _VERSIONS:
            _publish(stack, fast, num_bytes, version)
            for share in (*_KILLS_AT, 2.0):
                words = (slow.endpoint, str(spool), str(num_bytes), str(version))
                reader = started(stack, _MODULE, "follow", *words)
                outcome = _until(reader, share)
                kills += outcome not in ("equal", "WRONG")
                reader.bury()
            outcomes.append(outcome)
        _, down = slow.set(None)
        needed = num_bytes * len(_VERSIONS)
        left = sum(path.stat().st_size for path in spool.rglob("*") if path.is_file())
    print(
        f"{len(_VERSIONS)} versions of {num_bytes / 1e9:.2f} GB over {mbit_s:g} Mbit/s, {kills} "
        f"readers and {len(_VERSIONS)} trainers killed: {outcomes}, {down / 1e9:.3f} GB came, "
        f"{down / needed:.3f}x, {left} bytes left, {time.monotonic() - began:.0f} s"
    )
    if outcomes != ["equal"] * len(_VERSIONS) or down > 1.1 * needed:
        raise typer.Exit(1)


def _publish(stack: ExitStack, link: Link, num_bytes: int, version: int) -> None:
    """A version, by a trainer that was killed while it uploaded, and started again."""
    words = ("publish", link.endpoint, str(num_bytes), str(version))
    trainer, went = started(stack, _MODULE, *words), 0
    while went < num_bytes // 4:
        time.sleep(0.01)
        went += link.set(None)[0]
    trainer.bury()
    trainer = started(stack, _MODULE, *words)
    assert trainer.answer() == version
    trainer.bury()


def _until(reader: Told, share: float) -> Any:
    """The answer at which a reader has such a share, or its last one."""
    while not isinstance(answer := reader.answer(), str) and answer < share:
        pass
    return answer


if __name__ == "__main__":
    app()
