"""Megatron-Bridge: ranks share a distributed optimizer, and another model follows all of them.

torchrun --nproc-per-node 2 docs/examples/megatron_bridge.py FOLDER  # a checkpoint in bfloat16
"""

import sys
from collections import deque
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from transformers import AutoModelForCausalLM

from deltasync import WeightReceiver, WeightSender
from deltasync.integrations.streamed import StreamedWeights
from deltasync.integrations.transformers import transformers_target
from deltasync.transports import inprocess


def export(bridge: Any, model: list[Any]) -> Any:
    """The weights as a checkpoint has them. Each rank calls this, and goes through all of it."""
    for chunk in model:
        chunk.start_param_sync(force_sync=True)  # step() left it to the next forward
    return bridge.export_hf_weights(model, cpu=False, show_progress=False)


def made(folder: str, *, overlaps: bool = True) -> tuple[Any, list[Any], Any]:
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider()
    provider.transformer_layer_spec = local_layer_spec  # of torch alone
    provider.apply_rope_fusion = provider.persist_layer_norm = False
    provider.finalize()
    if not dist.is_initialized():
        dist.init_process_group()
        provider.initialize_model_parallel(seed=0)
    both: Any = {"use_distributed_optimizer": True, "overlap_param_gather": overlaps}
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, **both)
    model = provider.provide_distributed_model(ddp_config=ddp, bf16=True)
    config = OptimizerConfig(lr=1e-4, bf16=True, params_dtype=torch.bfloat16, **both)
    return bridge, model, get_megatron_optimizer(config, model)


def step(model: list[Any], optimizer: Any) -> None:
    tokens = torch.randint(3, 999, (4, 17), device="cuda")  # stand for rewarded rollouts
    places = torch.arange(16, device="cuda").expand(4, 16)
    optimizer.zero_grad()
    model[0].zero_grad_buffer()
    model[0](tokens[:, :-1], places, None, labels=tokens[:, 1:]).mean().backward()
    finalize_model_grads(model)
    optimizer.step()


def train(folder: str) -> None:
    bridge, model, optimizer = made(folder)
    weights, link, is_first = StreamedWeights(), inprocess.Sender(), dist.get_rank() == 0
    if is_first:  # in the place of a server, which takes an EngineSync
        engine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        receiver = WeightReceiver(transformers_target(engine), link.receiver())
        Thread(target=lambda: [receiver.receive_weights() for _ in range(5)]).start()
    sender = WeightSender(weights, link)
    for _ in range(5):
        if is_first:
            weights.take(export(bridge, model))
            sender.wait_for_receivers(1)
            print(sender.send_weights(), flush=True)
        else:
            deque(export(bridge, model), maxlen=0)  # rank 0 gathers with the others
        step(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(*sys.argv[1:])
