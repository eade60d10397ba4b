"""An engine whose own weights a proof could not put back takes no order any more, and says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import ModuleSource
from deltasync.engines.proof.cold import Startup
from deltasync.engines.proof.proving import Proof
from deltasync.errors import DirtyReceiver
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.trainer_info import TrainerInfo
from deltasync.integrations.worker import Worker
from deltasync.transports import shared_memory
from deltasync.transports.address import Address
from tests.worlds.toy_engines import Engine, InSet, checkpoint, work_on

TEXT = "the engine's weights could not be put back"


class Spoiled(Engine):
    made = InSet


class Server:
    """An engine of one worker; `is_paused` says whether it may generate."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights, self.is_paused = weights, False
        self.start(Spoiled)

    def start(self, kind: type[Engine]) -> None:
        self.kind, self.worker = kind, Worker()
        self.engine = kind.started(self.weights)

    def connect(self, connection: dict[str, Any], /) -> None:
        to, device = TrainerInfo.model_validate(connection), torch.device("cpu")
        self.worker.disconnect()
        try:
            target = self.worker.routed(self.engine, to, self._started_on, self._proof)
            self.worker.connect(to, target, device, rank=0, world=1)
        except Exception as error:
            self.worker.decline(to, device, error)
            raise RuntimeError("Call to collective_rpc method failed") from error

    def update(self, version: int, holder: str, /) -> None:
        assert self.is_paused
        self.worker.commit(version, holder)

    def name(self, version: int, holder: str, /) -> None:
        pass

    def disconnect(self, holder: str, /) -> None:
        self.worker.disconnect(holder)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        yield
        self.is_paused = False

    def _started_on(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())

    def _proof(self) -> Proof:
        return Proof(self.engine, Startup(self.kind, work_on=work_on))


def source(weights: dict[str, Tensor]) -> ModuleSource:
    module = Engine()
    for name, tensor in weights.items():
        module.get_parameter(name).data.copy_(tensor)
    return ModuleSource(module)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A proof puts everything back, whatever is raised. If it cannot, the worker refuses every "
    "request.",
)
def test_an_engine_that_a_proof_has_spoiled_takes_no_order(tmp_path: Path) -> None:
    weights = checkpoint()
    server = Server(weights)
    link = shared_memory.Sender(tmp_path / "socket")
    with EngineSync(source(weights), server, link, paused=server.paused) as sync:
        for call in (sync.connect, sync.send_weights, sync.connect):
            with pytest.raises(DirtyReceiver, match=TEXT):
                call()
            assert server.is_paused  # it must not generate with what it holds
        with pytest.raises(DirtyReceiver, match=TEXT):
            server.worker.commit(1, "")
    assert server.is_paused


def test_an_engine_that_was_started_again_in_the_place_of_a_spoiled_one_serves(
    tmp_path: Path,
) -> None:
    weights = checkpoint()
    server = Server(weights)
    link = shared_memory.Sender(tmp_path / "socket")
    with EngineSync(source(checkpoint(1)), server, link, paused=server.paused) as sync:
        with pytest.raises(DirtyReceiver, match=TEXT):
            sync.send_weights()
        server.start(Engine)
        assert sync.send_weights().full_synced == 1
        assert not server.is_paused
        server.worker.disconnect()
    for name, tensor in checkpoint(1).items():
        assert torch.equal(server.engine.get_parameter(name), tensor)


def test_a_worker_that_others_load_again_stays_spoiled() -> None:
    """What the engine has made of its weights is not known to be made again."""
    weights = checkpoint()
    server = Server(weights)
    with pytest.raises(DirtyReceiver, match=TEXT):
        _routed(server)
    server.worker.reloaded()
    with pytest.raises(DirtyReceiver, match=TEXT):
        _routed(server)


def _routed(server: Server) -> None:
    tensors = tuple(((n,), "bfloat16", tuple(t.shape)) for n, t in server.weights.items())
    to = TrainerInfo(
        addresses=(Address(link="shared_memory"),),
        engine="engine",
        tensors=tensors,
        max_staged_bytes=1,
        timeout_s=1,
    )
    server.worker.routed(server.engine, to, server._started_on, server._proof)
