"""Models of vLLM's own classes on a CPU, without an engine around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.worlds.ranks import free_port


@dataclass(frozen=True)
class Place:
    """One process of an engine.

    Attributes:
        rank: Its number.
        tensor_parallel, pipeline_parallel: Into how many the engine is split.
        port: Where the engine's processes meet.
        expert_parallel: Whether tensor parallel ranks have experts of their own instead.
    """

    rank: int
    tensor_parallel: int
    pipeline_parallel: int
    port: int
    expert_parallel: bool = False

    @property
    def world(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@contextmanager
def vllm_models(folder: Path, count: int, place: Place | None = None) -> Iterator[list[Any]]:
    """Models of vLLM's own class, not loaded, in a process that serves nothing else."""
    place = place or Place(0, 1, 1, free_port())
    from vllm.config import (
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        enforce_eager=True,
    )

    def config() -> VllmConfig:
        return VllmConfig(
            model_config=model_config,
            parallel_config=ParallelConfig(
                tensor_parallel_size=place.tensor_parallel,
                pipeline_parallel_size=place.pipeline_parallel,
                enable_expert_parallel=place.expert_parallel,
            ),
            device_config=DeviceConfig(device="cpu"),
        )

    with set_current_vllm_config(config()):
        address = f"tcp://127.0.0.1:{place.port}"
        init_distributed_environment(place.world, place.rank, address, place.rank, backend="gloo")
        initialize_model_parallel(place.tensor_parallel, place.pipeline_parallel)
    models = []
    for _ in range(count):
        with set_current_vllm_config(vllm := config()), set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=vllm, model_config=model_config)
        for parameter in model.parameters():
            parameter.data.zero_()
        models.append(model)
    try:
        with set_current_vllm_config(config()):
            yield models
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
