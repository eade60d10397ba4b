"""Models of SGLang's own classes on a CPU, loaded from a checkpoint as its workers load them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deltasync.integrations.trainer_info import TrainerInfo, WorkerRequest
from tests.engines import checkpoints
from tests.engines.checkpoints import Specs
from tests.worlds.ranks import free_port

# Latent attention, and no experts: SGLang's run on CPUs with AMX alone.
_MLA: dict[str, Any] = checkpoints.CONFIGS["DeepseekV3ForCausalLM"] | {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "first_k_dense_replace": 2,
    "attention_bias": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Two matrices of the checkpoint are one here, and its loader wants both in one call.
    "DeepseekV3ForCausalLM": _MLA,
}


def write_config(architecture: str, folder: Path) -> Specs:
    """A folder that a model can be made from. What its checkpoint has."""
    config = CONFIGS[architecture] | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    others: dict[str, tuple[int, ...]] = {
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    table = (config["vocab_size"], hidden)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (hidden,),
        "lm_head.weight": table,
    }
    attention = _latent_attention(config)
    layer = {f"self_attn.{name}": shape for name, shape in attention.items()} | others
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {name: (torch.bfloat16, shape) for name, shape in found.items()}


def _latent_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], 64
    rope = config["qk_rope_head_dim"]
    query = heads * (config["qk_nope_head_dim"] + rope)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), latent),
        "o_proj": (hidden, heads * config["v_head_dim"]),
    }
    rank = config["q_lora_rank"]
    shapes |= {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (query, rank)}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
