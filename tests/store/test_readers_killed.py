"""Readers killed at any moment: the weights are a version, unless they were being written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from deltasync.delta.bits import as_bits
from tests.cli.command import ENVIRONMENT
from tests.worlds.published import RUN, Publisher
from tests.worlds.stores import local_place

NUMEL = 20_000
READER = """
import sys, torch
from pathlib import Path
from torch import nn
from deltasync import ModuleTarget, ReceiverOptions
from deltasync.store.receiver import StoreReceiver
folder, staged = Path(sys.argv[1]), int(sys.argv[2])
model = nn.Module()
live = torch.from_file(str(folder / "weights"), shared=True, size={numel}, dtype=torch.bfloat16)
model.register_parameter("w", nn.Parameter(live, requires_grad=False))
options = ReceiverOptions(max_staged_bytes=staged)
receiver = StoreReceiver(ModuleTarget(model), folder / "store", options=options, spool=folder)
print("ready", flush=True)
to = 1
while True:
    if receiver.stage(to, timeout_s=60):
        (folder / "committing").touch()
        receiver.commit()
        (folder / "committing").unlink()
    to = to % 6 + 1
""".replace("{numel}", str(NUMEL))


class Weights(torch.nn.Sequential):
    """One parameter, which changes in a few places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w", torch.nn.Parameter(torch.zeros(NUMEL).bfloat16()))


def step(model: torch.nn.Sequential) -> None:
    with torch.no_grad():
        model.get_parameter("w")[torch.rand(NUMEL) < 0.05] += 1


def test_a_reader_that_is_killed_leaves_a_version(tmp_path: Path) -> None:
    trainer = Publisher(local_place(tmp_path / "store"), anchor_every=3, model=Weights())
    trainer.publish(6, step=step)
    (tmp_path / "weights").write_bytes(bytes(2 * NUMEL))
    versions = [as_bits(state["w"]) for state in trainer.states.values()]
    seed = random.randrange(1 << 30)
    chance, in_commit = random.Random(seed), 0
    for _ in range(8):
        command = [sys.executable, "-c", READER, str(tmp_path), str(1 << 30)]
        with subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", seed
            time.sleep(chance.random() * 0.5)
            os.kill(process.pid, signal.SIGKILL)
        if (tmp_path / "committing").exists():
            (tmp_path / "committing").unlink()
            in_commit += 1
            continue
        assert any(torch.equal(live(tmp_path), one) for one in versions), seed
    assert in_commit < 8, "killed while committing every time: nothing was shown"
    assert (tmp_path / "store" / RUN).exists()


def live(folder: Path) -> Tensor:
    return torch.frombuffer(bytearray((folder / "weights").read_bytes()), dtype=torch.int16)
