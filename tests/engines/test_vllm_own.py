"""vLLM's own tests of its worker and of its backends, of an engine that has a trainer.

`tests/v1/worker/test_gpu_worker_weight_transfer.py`:

- a worker with an engine: applies, what it passes on and what it refuses;
- an update that raises, an update of a draft model: no, vLLM's mock makes up both;
- a worker without an engine, reloading: no, there is nothing of ours in it.

`tests/distributed/test_weight_transfer.py`, where "nccl" is ours:

- `TestEngineRegistry`, `TestNCCLEngineParsing`: that we are made, and refuse what is not for us;
  not the fields of NCCL's messages, nor what is about the registry or another backend;
- `TestDeferredProcessingContract`: what holds for any engine; not the engine that defers;
- `TestTrainerClients`: that ours are clients; not how theirs write messages of other backends;
- an update before the engine is connected: no, ours raises ConfigError and not RuntimeError;
- `trainer_init` without a source, and on a rank that does not send: that ours refuses, and asks
  the engine for nothing; not how NCCL's sends, and what its errors say (`test_vllm_trainer.py`
  has the same cases);
- `TestTrainerFactory`, `TestTrainerEngineBase`, `TestModuleSource`,
  `TestWeightSourceGroupContract`: no, there is nothing of ours in them;
- IPC, sparse NCCL, ModelExpress, between processes: no, other backends, with GPUs and Ray.

`tests/entrypoints/rl/weight_transfer/test_offline.py`: in `test_vllm_own_offline.py`.

`tests/entrypoints/rl/state_transitions`: not run here. Pausing and the checker of weights would
apply, to servers that take minutes to start; sleeping wants a GPU.

`test_weight_transfer_m2n.py`, `test_weight_transfer_nccl_uid.py`, `test_sharded_rdt_*.py`,
`test_packed_tensor.py`, `test_checkpoint_weight_patch.py`: no, parts of other backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import get_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from deltasync.integrations.vllm import AsyncClient, HttpClient, OfflineClient, register
from deltasync.integrations.vllm_engine import DeltaSyncEngine
from deltasync.integrations.vllm_trainer import DeltaSyncTrainer, DeltaSyncTrainerInitInfo
from tests.engines.checkpoints import write_config, write_model
from tests.engines.models import vllm_models
from tests.engines.vllm_own import own

WORKER = own.load("tests/v1/worker/test_gpu_worker_weight_transfer.py")
TRANSFER = own.load("tests/distributed/test_weight_transfer.py")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A worker's model, and its configuration."""
    folder = write_config("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    write_model(folder)
    with vllm_models(folder, 1) as [model], pytest.MonkeyPatch.context() as patch:
        # Matrices stay where they are loaded: a fresh engine does not pack them either.
        patch.setattr("vllm._custom_ops._supports_onednn", False)
        yield model, get_current_vllm_config()
    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def trained_engines(worker: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's tests of its worker get engines that have connected."""
    model, vllm_config = worker
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # there is none
    weights = load_file(f"{vllm_config.model_config.model}/model.safetensors")
    model.load_weights(iter(weights.items()))
    with ExitStack() as open_syncs:

        def make() -> own.Trained:
            config = WeightTransferConfig(backend="deltasync")
            engine = own.Trained(config, vllm_config, torch.device("cpu"), model)
            open_syncs.callback(engine.sync.close)
            open_syncs.callback(engine.sync.disconnect)
            engine.init_transfer_engine(None)
            return engine

        monkeypatch.setattr(WORKER, "_RecordingEngine", make)
        yield


@pytest.fixture(autouse=True)
def ours_for_theirs(worker: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's tests of its backends and clients get ours."""
    register()
    monkeypatch.setattr(TRANSFER, "create_mock_vllm_config", lambda: worker[1])
    registry = WeightTransferEngineFactory._registry
    monkeypatch.setitem(registry, "nccl", registry["deltasync"])
    monkeypatch.setattr(TRANSFER, "NCCLWeightTransferEngine", DeltaSyncEngine)
    monkeypatch.setattr(TRANSFER, "RecordingClient", OursForTheirs)
    monkeypatch.setattr(TRANSFER, "NCCLTrainerInitInfo", own_init_info)
    monkeypatch.setattr(TRANSFER, "NCCLTrainerWeightTransferEngine", DeltaSyncTrainer)
    monkeypatch.setattr(DeltaSyncTrainer, "model_update_group", None, raising=False)
    monkeypatch.setattr(TRANSFER, "HTTPVLLMWeightSyncClient", HttpClient)
    monkeypatch.setattr(
        TRANSFER, "RayVLLMWeightSyncClient", lambda handle: AsyncClient(handle, MagicMock())
    )


class OursForTheirs(OfflineClient):
    """Of an LLM of which every call would be noted."""

    def __init__(self) -> None:
        super().__init__(MagicMock())

    @property
    def order(self) -> list[Any]:
        return list(self._llm.mock_calls)


def own_init_info(*, rank: int, **_: object) -> DeltaSyncTrainerInitInfo:
    return DeltaSyncTrainerInitInfo("shared_memory", settings={"workers": 1}, rank=rank)


globals().update(
    own.tests(
        TRANSFER,
        "test_nccl_trainer_init_non_sender_skips_rendezvous_and_client",
        "test_nccl_trainer_init_requires_source",
    )
)
globals().update(
    own.tests(
        WORKER,
        "test_shutdown_weight_transfer_engine_preserves_inference",
        "test_start_update_finish_delegates_to_engine",
        "test_rank_local_update_selects_worker_payload",
        "test_rank_local_update_uses_data_parallel_index_after_reconfigure",
        "test_double_start_raises",
        "test_update_without_start_raises",
        "test_finish_without_start_raises",
    )
)
TestRegistry = own.class_of(TRANSFER.TestEngineRegistry, "test_create_engine_nccl")
TestParsing = own.class_of(
    TRANSFER.TestNCCLEngineParsing, "test_parse_init_info_missing_field_raises"
)
TestDeferredProcessing = own.class_of(
    TRANSFER.TestDeferredProcessingContract,
    "test_every_engine_declares_whether_it_defers",
    "test_every_engine_can_be_drained",
    "test_a_synchronous_engine_drains_as_a_no_op",
)
TestClients = own.class_of(
    TRANSFER.TestTrainerClients,
    "test_recording_client_is_protocol",
    "test_http_client_is_protocol",
    "test_ray_client_is_protocol",
)
