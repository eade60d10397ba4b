"""Models of SGLang's own classes on a CPU, loaded from a checkpoint as its workers load them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deltasync.integrations.trainer_info import TrainerInfo, WorkerRequest
from tests.worlds.ranks import free_port


def started(folder: Path) -> Any:
    """A worker's model, made from the folder and loaded. One in each process."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_radix_cache=True,
        context_length=128,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=free_port())
    config = ModelConfig.from_server_args(arguments)
    load = LoadConfig(load_format=arguments.load_format)
    return get_model(model_config=config, load_config=load, device_config=DeviceConfig("cpu"))


class Server:
    """Hands orders to the loader of a model in this process."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def connect(self, connection: dict[str, Any], /) -> None:
        self._request(WorkerRequest(trainer=TrainerInfo.model_validate(connection)))

    def update(self, version: int, holder: str, /) -> None:
        self._request(WorkerRequest(version=version, holder=holder))

    def name(self, version: int, holder: str, /) -> None:
        """Nobody asks for it."""

    def disconnect(self, holder: str, /) -> None:
        self._request(WorkerRequest(holder=holder))

    def _request(self, request: WorkerRequest) -> None:
        from deltasync.integrations.sglang import handle_request

        runner = SimpleNamespace(model=self._model, is_draft_worker=False)
        handle_request(runner, request.model_dump_json())
