"""An engine and the ranks of its trainer in processes of their own, over each link."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync import ModuleTarget, TrainerGroup, TrainerRank
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.transports import collective, cuda_ipc, shared_memory
from deltasync.transports.base import SendTransport
from tests.worlds.links import Model, bits_equal, random_model, step, until
from tests.worlds.ranks import run_ranks
from tests.worlds.trainers import Sharded, rows_of

SHAPES = {"a": (300, 70), "b": (41, 900), "norm": (64,), "odd": (1, 5)}
VERSIONS = 4


@pytest.mark.parametrize(
    "link",
    [
        "shared_memory",
        "gloo",
        pytest.param("cuda_ipc", marks=pytest.mark.gpu),
        pytest.param("nccl", marks=pytest.mark.multigpu),
    ],
)
def test_an_engine_follows_two_ranks(link: str, tmp_path: Path) -> None:
    """On GPUs ranks share the first one; with NCCL the engine has one to itself."""
    run_ranks(take_part, 3, link, tmp_path, timeout_s=150)


def take_part(process: int, link: str, folder: Path) -> None:
    if process == 2:
        serve(folder, {"cuda_ipc": "cuda:0", "nccl": "cuda:1"}.get(link, "cpu"))
    else:
        train(process, link, folder)


def sender(link: str, path: Path) -> SendTransport:
    match link:
        case "nccl":
            return collective.Sender(backend="nccl", device="cuda:0")
        case "gloo":
            return collective.Sender()
        case "cuda_ipc":
            return cuda_ipc.Sender(path, device="cuda:0")
    return shared_memory.Sender(path)


def train(rank: int, link: str, folder: Path) -> None:
    model = random_model(SHAPES, 1)
    device = "cuda:0" if link in ("cuda_ipc", "nccl") else "cpu"
    source = Sharded(model, rows_of(model, 2)[rank], device)
    lane = sender(link, folder / f"rank{rank}")
    sends: EngineSync | TrainerRank
    if rank == 0:
        group = TrainerGroup(shared_memory.Sender(folder / "group"), 2)
        sends = EngineSync(source, Server(folder), lane, group=group)
    else:
        hub = shared_memory.Receiver(folder / "group")
        sends = TrainerRank(source, lane, hub, rank=rank, world=2)
    for version in range(1, VERSIONS + 1):
        advance(model, version)
        source.step()
        stats = sends.send_weights()
        assert (stats.version, stats.receivers, stats.lost) == (version, 1, {})
    sends.close()


class Server:
    """Calls of the engine's process."""

    def __init__(self, folder: Path) -> None:
        until(lambda: self._reach(folder / "calls"))

    def _reach(self, path: Path) -> bool:
        """Whether the engine listens: its socket is there a moment before."""
        with suppress(FileNotFoundError, ConnectionRefusedError):
            self._calls = Client(str(path))
        return hasattr(self, "_calls")

    def connect(self, connection: dict[str, Any], /) -> None:
        self._call("connect", connection)

    def update(self, version: int, holder: str, /) -> None:
        self._call("update", version, holder)

    def name(self, version: int, holder: str, /) -> None:
        self._call("name", version)

    def disconnect(self, holder: str, /) -> None:
        self._call("disconnect")

    def _call(self, *call: object) -> None:
        self._calls.send(call)
        self._calls.recv()


def serve(folder: Path, device: str) -> None:
    expected, model = random_model(SHAPES, 1), random_model(SHAPES, 2).to(device)
    worker = Worker()
    with Listener(str(folder / "calls")) as listener, listener.accept() as calls:
        for _ in range(1 + 2 * VERSIONS):
            match calls.recv():
                case "connect", connection:
                    to = TrainerInfo.model_validate(connection)
                    target, place = ModuleTarget(model), torch.device(device)
                    worker.connect(to, target, place, rank=0, world=1)
                case "update", version, holder:
                    worker.commit(version, holder)
                case "name", version:
                    advance(expected, version)
                    held = {name: tensor.cpu() for name, tensor in model.named_parameters()}
                    assert bits_equal(Model(held), expected)
            calls.send("done")
    worker.disconnect()


def advance(model: Model, version: int) -> None:
    step(model, torch.Generator().manual_seed(version), 0.3)
