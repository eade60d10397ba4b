"""Models as vLLM's workers make, load and update them on a CPU, without an engine around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltasync import WeightSource
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import VllmServer, register
from deltasync.transports import shared_memory
from tests.engines.checkpoints import save
from tests.worlds.ranks import free_port


def settings(folder: Path, **other: Any) -> Any:
    """vLLM's configuration of an engine that is started on this folder."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 64,
        "enforce_eager": True,
        "weight_transfer_config": {"backend": "deltasync"},
    }
    return EngineArgs(**options | other).create_engine_config()


@contextmanager
def alone() -> Iterator[None]:
    """A process that is all of an engine."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{free_port()}"
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def cold(folder: Path, weights: dict[str, Tensor] | None = None, **other: Any) -> tuple[Any, Any]:
    """What a worker holds that was just started on these weights: its model, and its settings."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    if weights is not None:
        save(folder, weights)
    config = settings(folder, **other)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


class Engine:
    """Calls a worker's weight transfer engine as vLLM's worker does: a client of vLLM's."""

    def __init__(self, model: Any, config: Any) -> None:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

        device = torch.device("cpu")
        backend = config.weight_transfer_config
        self._config, self._engine = config, Factory.create_engine(backend, config, device, model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            self._engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any], /) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            self._engine.receive_weights(self._engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            self._engine.finish_weight_update()


def connecting(source: WeightSource, engine: Engine, folder: Path, **settings: Any) -> EngineSync:
    """A trainer's hold on it."""
    server = VllmServer(engine, caches="keep")  # nothing is cached
    return EngineSync(source, server, shared_memory.Sender(folder / "socket"), **settings)
