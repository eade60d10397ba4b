"""Actors for verl's own call path on CPUs: FSDP2 trainers, rollout workers that load by name."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import ActorRolloutRefWorker

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Experts(nn.Module):
    """Stacked, as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, 6))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 5))


class Layer(nn.Module):
    """A place for modules."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class Policy(nn.Module):
    """A model of a few layers, of which one has experts. It is never run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = Layer(attn=nn.Linear(64, 33), norm=nn.LayerNorm(64))
        routed = Layer(mlp=Layer(experts=Experts()))
        self.embed = nn.Embedding(101, 64)
        self.layers = nn.ModuleList([layer, routed])

    def load(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of the checkpoint."""
        found = EXPERT.fullmatch(name)
        if found is None:
            self.get_parameter(name).data.copy_(tensor)
            return
        stem, expert, kind = found.groups()
        fused = "down_proj" if kind == "down" else "gate_up_proj"
        place = self.get_parameter(f"{stem}.{fused}").data[int(expert)]
        if kind != "down":
            place = place.chunk(2)[kind == "up"]
        place.copy_(tensor)


class LoadsByName:
    """What verl's rollout adapters do: load whole tensors by name.

    Args:
        load: Takes one of them.

    Attributes:
        fails: Whether the next load fails, once.
    """

    def __init__(self, load: Callable[[str, Tensor], None]) -> None:
        self._load, self.fails = load, False
        self.steps: int | None = None
        self.replica_rank, self.is_leader_rank = 0, True

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "",
    ) -> None:
        assert wire_format == "named_tensors"
        async for name, tensor in weights:
            if self.fails:
                self.fails = False
                raise RuntimeError("planted: out of memory")
            self._load(name, tensor)
        self.steps = global_steps


class TrainerWorker(Worker):
    """A rank of verl's FSDP2 trainer, as far as a CPU lets it."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self, config: Any, folder: str | None = None) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        transformer_impl.get_device_id = lambda: "cpu"  # verl looks for a GPU in these two
        transformer_impl.log_gpu_memory_usage = lambda *args, **kwargs: None
        engine = FSDPEngine.__new__(FSDPEngine)
        engine.module = Policy() if folder is None else AutoModelForCausalLM.from_pretrained(folder)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in engine.module.base_model.layers if folder else engine.module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(engine.module, mesh=mesh)
        engine._uses_fsdp2_cpu_offload_policy = engine._is_offload_param = False
        engine._qat_enabled = False
        hf_config = SimpleNamespace(model_type="qwen3_moe")
        engine.model_config = SimpleNamespace(lora={}, hf_config=hf_config)
        self.actor = SimpleNamespace(engine=engine)
        self.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=config))
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, every: int) -> None:
        """Change some elements of each shard."""
        for parameter in self.actor.engine.module.parameters():
            local = parameter.data.to_local()
            local.view(-1)[::every] *= -1.5

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, Tensor]:
        """All of them, in bfloat16."""
        named = self.actor.engine.module.state_dict().items()
        full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named}
        return {name: tensor.bfloat16() for name, tensor in full.items()}


class RolloutWorker(CheckpointEngineWorker):
    """verl's rollout worker, whose inference engine is of the same process."""

    def __init__(self, config: Any) -> None:
        policy = Policy().bfloat16()
        super().__init__(config, None, LoadsByName(policy.load))
        for parameter in policy.parameters():
            parameter.data.zero_()
        self.policy = policy

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[dict[str, Tensor], int | None]:
        """Weights, and the step that they are of."""
        return dict(self.policy.state_dict()), self.server_adapter.steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_once(self) -> None:
        """The next load fails."""
        self.server_adapter.fails = True
