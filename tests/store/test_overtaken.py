"""Readers that fall behind what is kept: they go on with the newest version, and never mix two."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource, SenderOptions, StoreSender
from deltasync.errors import ObjectDamaged
from deltasync.files.checkpoint import Checkpoint
from deltasync.store.anchors import PublishOptions
from deltasync.store.checkpoints import fetch_checkpoint
from deltasync.store.retention import gc
from tests.cli.command import COMMAND, ENVIRONMENT
from tests.worlds.faults import Faults, faulty
from tests.worlds.published import Publisher
from tests.worlds.stores import Place, local_place, s3_place
from tests.worlds.strategies import same_bits

SIDE = 2048
READER = """
import hashlib, sys, torch
from torch import nn
from deltasync import ModuleTarget, StoreReceiver
from deltasync.store.objects import StoreOptions
url, options, last = sys.argv[1], StoreOptions.model_validate_json(sys.argv[2]), int(sys.argv[3])
engine = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
receiver = StoreReceiver(ModuleTarget(engine), url, run="run", store=options)
with receiver, receiver.follow() as follower:
    while receiver.version != last:
        if follower.wait_staged(timeout_s=60):
            follower.commit()
            bits = engine.weight.detach().view(torch.int16).numpy().tobytes()
            print(receiver.version, hashlib.sha256(bits).hexdigest(), flush=True)
"""


@pytest.fixture
def link(s3: str) -> Iterator[tuple[Place, Place, Faults]]:
    """A bucket as it is, the same through a proxy, and what the proxy does."""
    with faulty(s3) as (endpoint, faults):
        near = s3_place(s3)
        config = {**near.options.config, "endpoint": endpoint}
        yield near, Place(near.url, near.options.model_copy(update={"config": config})), faults


class Trainer:
    """Publishes an anchor and three deltas at a time.

    Attributes:
        digests: SHA-256 of the weights of each version.
    """

    def __init__(self, place: Place) -> None:
        self.model = nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16)
        self._sender = StoreSender(
            ModuleSource(self.model),
            place.url,
            options=SenderOptions(stream_id="run"),
            store=place.options,
            publishing=PublishOptions(anchor_every=4),
        )
        self.digests: dict[int, str] = {}

    def publish(self, count: int) -> None:
        for _ in range(count):
            with torch.no_grad():
                self.model.weight[torch.rand(SIDE, SIDE) < 0.4] += 1
            self.digests[self._sender.publish().version] = sha256_of(self.model.weight)


def sha256_of(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().view(torch.int16).numpy().tobytes()).hexdigest()


def collect(place: Place) -> None:
    """Delete all but the newest version, and what it needs, in a process of its own."""
    config = [f"--config={name}={value}" for name, value in place.options.config.items()]
    done = subprocess.run(
        [*COMMAND, "gc", place.url, "--keep", "1", "--keep-hours", "0", *config],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.promise(
    "Cost",
    "A reader whose objects are deleted while it fetches them goes on with the newest "
    "version, and never mixes two.",
)
@pytest.mark.parametrize("held", [None, 2])
def test_a_slow_reader_goes_on_with_the_newest_version(
    link: tuple[Place, Place, Faults], held: int | None
) -> None:
    """An anchor, or the deltas from a version held, are deleted while they come."""
    near, far, faults = link
    trainer, last, asked = Trainer(near), 6, threading.Event()

    def choose(method: str, path: str) -> None:
        """Bring next to nothing, once the object is asked for."""
        if method == "GET" and ("-anchor-" if held is None else f"{held + 1:016}-delta-") in path:
            faults.bytes_per_s = 1_000
            asked.set()

    faults.choose = choose
    trainer.publish(held or 4)
    command = [sys.executable, "-c", READER, far.url, far.options.model_dump_json(), str(last)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        lines = (line.split() for line in reader.stdout)
        try:
            if held is not None:
                assert held_until(lines, trainer, held) == [held]
                trainer.publish(1)
            assert asked.wait(60)
            trainer.publish(last - len(trainer.digests))
            collect(near)
            faults.choose, faults.bytes_per_s = lambda method, path: None, None
            assert held_until(lines, trainer, last) == [last]
            assert reader.wait(60) == 0
        finally:
            reader.kill()


def held_until(lines: Iterator[list[str]], trainer: Trainer, version: int) -> list[int]:
    """The versions that the reader holds, each bit for bit, up to this one."""
    versions = []
    for held, digest in lines:
        versions.append(int(held))
        assert digest == trainer.digests[versions[-1]]
        if versions[-1] == version:
            break
    return versions


@pytest.mark.parametrize("to", [None, 2])
def test_a_checkpoint_is_the_newest_version_or_the_one_that_was_asked_for(
    tmp_path: Path, to: int | None
) -> None:
    """The objects of the version are deleted when they are about to be fetched."""
    place = local_place(tmp_path / "store")
    trainer = Publisher(place, anchor_every=2)
    trainer.publish(2)

    def phase(name: str, num_bytes: int) -> Callable[[int], None]:
        if name == "fetching" and max(trainer.states) == 2:
            trainer.publish(4)
            gc(place.url, keep=1, keep_s=0)
        return lambda count: None

    out = tmp_path / "out"
    if to is not None:
        with pytest.raises(ObjectDamaged, match="missing"):
            fetch_checkpoint(place.url, out, to=to, phase=phase)
        assert not out.exists()
        return
    assert fetch_checkpoint(place.url, out, phase=phase).version == 6
    written = Checkpoint(out)
    assert set(trainer.states[6]) - set(written.specs) == {"3.weight"}, "which is tied"
    for name in written.specs:
        assert same_bits(written.tensor(name), trainer.states[6][name])
