"""Lets vLLM's own tests, fetched by `fetch.sh` and unchanged, run against our backend.

A file of theirs is loaded as a module. Where it makes an engine it gets a `Trained` one, and tests
are taken from it by name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import get_current_vllm_config

from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm_engine import DeltaSyncEngine, InitInfo, UpdateInfo
from deltasync.transports import shared_memory
from tests.engines.checkpoints import Weights, changed

FETCHED = Path(sys.prefix) / "vllm-tests"
WATCHED = "model.layers.0.mlp.down_proj.weight"  # which vLLM keeps as it is in the checkpoint


def load(path: str) -> ModuleType:
    """One of vLLM's test files, without the modules that it wants for what is not run here."""
    file = FETCHED / path
    if not file.exists():
        pytest.skip(f"there is no {file}: make test-engines fetches it", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(f"vllm_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    in_this_process = SimpleNamespace(create_new_process_for_each_test=lambda: lambda test: test)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", MagicMock())
        patch.setitem(sys.modules, "tests.utils", in_this_process)
        spec.loader.exec_module(module)
    return module


def tests(module: ModuleType, *names: str) -> dict[str, Any]:
    """Those of a module's tests that have these names."""
    return {name: getattr(module, name) for name in names}


def class_of(cls: Any, *names: str) -> type:
    """A class of tests, with those alone that have these names."""
    assert vars(cls).keys() >= set(names)
    others = {name for name in vars(cls) if name.startswith("test_")} - set(names)
    return type(cls.__name__, (cls,), dict.fromkeys(others))


OFFLINE = load("tests/entrypoints/rl/weight_transfer/test_offline.py")


class Trained(DeltaSyncEngine):
    """Ours, which notes down what vLLM's mocks note down.

    It has a trainer that it connects to when tests let it connect, whatever they say; their updates
    let the trainer send a version that differs.
    """

    init_info_cls, update_info_cls = OFFLINE.MockInitInfo, OFFLINE.MockUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        folder = Path(self.model_config.model)
        self.source = Weights(load_file(folder / "model.safetensors"))
        link = shared_memory.Sender(folder / "socket")
        self.sync = EngineSync(self.source, self, link, timeout_s=20)
        self.started = self.finished = self.closed = False
        self.init_transfer_engine_called = self.receive_weights_called = False
        self.reset_count = 0
        self.update_calls: list[dict[str, Any]] = []
        self.seen_configs: list[Any] = []

    @property
    def shutdown_called(self) -> bool:
        return self.closed

    # What the trainer asks for.

    def connect(self, connection: dict[str, Any]) -> None:
        super().init_transfer_engine(InitInfo(connection))

    def update(self, version: int, holder: str) -> None:
        super().receive_weights(UpdateInfo(version, holder))

    def name(self, version: int, holder: str) -> None:
        self.weight_version = version

    def disconnect(self, holder: str) -> None:
        super().init_transfer_engine(InitInfo(holder=holder))

    # What vLLM's tests ask for.

    def init_transfer_engine(self, init_info: Any) -> None:
        self.sync.connect()
        assert self.sync.send_weights().full_synced == 0
        self.init_transfer_engine_called, self.last_init_info = True, init_info
        self.closed = False

    def start_weight_update(self) -> None:
        self.seen_configs.append(get_current_vllm_config())
        super().start_weight_update()
        self.started = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.seen_configs.append(get_current_vllm_config())
        super().update_weights(update_info)
        self.update_calls.append(update_info)

    def receive_weights(self, update_info: Any) -> None:
        self.source.take(changed(self.source.weights, 0.1, seed=1))
        stats = self.sync.send_weights()
        assert (stats.kind, stats.lost) == ("delta", {})
        held = dict(self.model.named_parameters())[WATCHED]
        assert torch.equal(held, self.source.weights[WATCHED])
        self.receive_weights_called, self.last_update_info = True, update_info

    def finish_weight_update(self) -> None:
        self.seen_configs.append(get_current_vllm_config())
        super().finish_weight_update()
        self.finished = True

    def reset_weight_update_target(self) -> None:
        super().reset_weight_update_target()
        self.reset_count += 1

    def shutdown(self) -> None:
        super().shutdown()
        self.closed = True
