"""SGLang's loader never raises: that would end the server."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasync import ModuleSource
from deltasync.errors import EngineFailed
from deltasync.integrations.connection import Connection, Order
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.sglang import _named_tensor, load
from deltasync.transports import shared_memory
from tests.sync.harness import random_model

pytestmark = pytest.mark.timeout(60)


def order(text: str) -> list[tuple[str, Tensor]]:
    return [("deltasync", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


@pytest.mark.parametrize(
    "given",
    [
        [],
        [("a", None)],
        [("a", torch.tensor(1 << 40))],
        [("a", torch.zeros(2, 2, dtype=torch.uint8))],
        order("{"),
        order('{"version": "7"}'),
        order('{"version": 7}'),
        order('{"unknown": 7}'),
        order('{"connection": {"addresses": [{"link": "pigeon"}]}}'),
    ],
)
def test_orders_that_make_no_sense_are_refused_quietly(given: Any) -> None:
    load(nn.Linear(2, 2), given)


def test_an_order_travels_as_a_tensor_that_sglang_can_read() -> None:
    data = b'{"version": 7}' * 1000
    [(name, tensor)] = pickle.loads(_named_tensor(data))  # noqa: S301 (as SGLang does)
    assert (name, tensor.dtype, bytes(tensor.numpy())) == ("deltasync", torch.uint8, data)


class Worker:
    """A server of one worker, which is not SGLang's: it has no loader to watch."""

    def connect(self, connection: dict[str, Any], /) -> None:
        asked = Order(connection=Connection.model_validate(connection))
        load(nn.Linear(2, 2), order(asked.model_dump_json()))

    def update(self, version: int, /) -> None: ...

    def name(self, version: int, /) -> None: ...

    def disconnect(self) -> None: ...


def test_a_worker_that_cannot_connect_tells_the_trainer(tmp_path: Path) -> None:
    source = ModuleSource(random_model({"a": (3,)}, 0))
    link = shared_memory.Sender(tmp_path / "socket")
    with (
        EngineSync(source, Worker(), link) as sync,
        pytest.raises(EngineFailed, match="load_weights"),
    ):
        sync.connect()
