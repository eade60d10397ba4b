"""SGLang's workers answer what is wrong with an order; none of it ends the server."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from deltasync import ModuleSource
from deltasync.errors import EngineFailed
from deltasync.integrations.connection import Connection, Order
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.sglang import Extension
from deltasync.transports import shared_memory
from tests.sync.harness import random_model

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of it an order asks for."""
    context = ModuleType("sglang.srt.runtime_context")
    waits = SimpleNamespace(checkpoint_engine_wait_weights_before_ready=False)
    context.get_server_args = lambda: waits  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)


def give(text: str, *, is_draft_worker: bool = False) -> None:
    runner = SimpleNamespace(model=nn.Linear(2, 2), is_draft_worker=is_draft_worker)
    Extension(runner).update_weights_from_ipc({"deltasync": text})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "deltasync: ValidationError"),
        ("{", "deltasync: ValidationError"),
        ('{"version": "seven"}', "version"),
        ('{"version": 7}', "deltasync: ConfigError: no trainer is connected"),
        ('{"unknown": 7}', "unknown"),
        ('{"connection": {"addresses": [{"link": "pigeon"}]}}', "pigeon"),
    ],
)
def test_orders_that_make_no_sense_are_answered(text: str, said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        give(text)
    give(text, is_draft_worker=True)  # which keeps its weights


def test_a_socket_of_a_parameter_server_is_answered_where_checkpoint_engine_is_missing() -> None:
    runner = SimpleNamespace(model=nn.Linear(2, 2), is_draft_worker=False)
    with pytest.raises(EngineFailed, match="checkpoint-engine cannot be imported"):
        Extension(runner).update_weights_from_ipc({"GPU-1": "ipc://socket"})


class Worker:
    """A server of one worker, which is not SGLang's: it has no loader to watch."""

    def connect(self, connection: dict[str, Any], /) -> None:
        asked = Order(connection=Connection.model_validate(connection))
        give(asked.model_dump_json())

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
