"""Names: tied ones, those that an engine does not take, and what a user is told of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource
from deltasync.errors import ConfigError, EngineFailed
from deltasync.integrations.connection import Connection
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.worker import Worker
from deltasync.transports import shared_memory
from tests.sync.harness import Model

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


class Engine(nn.Module):
    """Takes the embedding under one name, and a norm.

    Args:
        embedding: The name.
        others: What becomes of names that it does not know: "skipped", or "refused".
    """

    def __init__(self, embedding: str, others: str = "skipped") -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)
        self._names = {embedding: self.table, "norm": self.norm}
        self._others = others

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if self._others == "refused" and name not in self._names:
                raise KeyError(name)
            if name in self._names:
                self._names[name].data.copy_(tensor)


class Server:
    """An engine of one worker, by routes."""

    def __init__(self, engine: nn.Module, started_on: dict[str, Tensor]) -> None:
        self.engine, self.worker, self._started_on = engine, Worker(), started_on

    def connect(self, connection: dict[str, Any], /) -> None:
        self.worker.disconnect()
        to = Connection.model_validate(connection)
        try:
            target = self.worker.routed(self.engine, to, lambda: self._started_on.items())
            self.worker.connect(to, target, CPU, rank=0, world=1)
        except Exception as error:
            self.worker.decline(to, CPU, error)
            raise

    def update(self, version: int, /) -> None:
        self.worker.commit(version)

    def name(self, version: int, /) -> None: ...

    def disconnect(self) -> None:
        self.worker.disconnect()


@contextmanager
def syncing(
    source: nn.Module, server: Server, folder: Path, **options: Any
) -> Iterator[EngineSync]:
    link = shared_memory.Sender(folder / "socket")
    with EngineSync(ModuleSource(source), server, link, timeout_s=20, **options) as sync:
        yield sync
        server.worker.disconnect()


def tied(first: str, second: str) -> Model:
    """A model whose embedding is its head: under two names, in this order."""
    generator = torch.Generator().manual_seed(0)
    model = Model({first: torch.randn(6, 4, generator=generator)})
    model.register_parameter(second, model.get_parameter(first))
    model.register_parameter("norm", nn.Parameter(torch.ones(4), requires_grad=False))
    return model


@pytest.mark.parametrize("others", ["skipped", "refused"])
@pytest.mark.parametrize("names", [("head", "embed"), ("embed", "head")])
@pytest.mark.parametrize("saved", ["head", "embed"])
def test_an_engine_takes_a_tied_tensor_under_any_of_its_names(
    names: tuple[str, str], others: str, saved: str, tmp_path: Path
) -> None:
    source, engine = tied(*names), Engine("embed", others)
    started_on = {saved: torch.zeros(6, 4), "norm": torch.zeros(4)}
    with syncing(source, Server(engine, started_on), tmp_path) as sync:
        assert sync.send_weights().full_synced == 1
        assert torch.equal(engine.table, source.get_parameter("embed"))
        source.get_parameter("embed").data[3, 2] = 7
        assert sync.send_weights().kind == "delta"
        assert torch.equal(engine.table, source.get_parameter("embed"))


class Untied(Engine):
    """Has a head of its own."""

    def __init__(self) -> None:
        super().__init__("embed")
        self.own = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self._names["head"] = self.own


def test_an_engine_that_does_not_tie_what_the_trainer_ties_is_refused(tmp_path: Path) -> None:
    source = tied("head", "embed")
    started_on = {name: torch.zeros(6, 4) for name in ("head", "embed")} | {"norm": torch.zeros(4)}
    why = r"'head' is tied at the trainer \('head' and 'embed'\), .* as 'own' and 'table': start"
    with (
        syncing(source, Server(Untied(), started_on), tmp_path) as sync,
        pytest.raises((ConfigError, EngineFailed), match=why),
    ):
        sync.connect()
