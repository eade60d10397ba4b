"""vLLM's AsyncLLM, whose requests go on while its weights are replaced.

python docs/examples/vllm_async.py MODEL

MODEL is a folder of a checkpoint, or its name on the hub. Workers receive and check a version while
they generate; generation is paused for no longer than it takes to write it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from deltasync import ModuleSource
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import AsyncClient, VllmServer
from deltasync.transports import cuda_ipc, shared_memory

PROMPT = {"prompt_token_ids": list(range(10, 30))}


async def main(model: str) -> None:
    is_gpu = torch.cuda.is_available()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="bfloat16",
            gpu_memory_utilization=0.4,  # the trainer lives on the same GPU
            weight_transfer_config={"backend": "deltasync"},
        )
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy.to("cuda" if is_gpu else "cpu")
    client = AsyncClient(engine, asyncio.get_running_loop())
    link = cuda_ipc if is_gpu else shared_memory
    with tempfile.TemporaryDirectory() as folder:
        transport = link.Sender(Path(folder) / "weights.sock")
        with EngineSync(
            ModuleSource(policy),
            VllmServer(client),
            transport,
            paused=client.paused,
            without_routes="reload",  # on CPUs vLLM packs its matrices
        ) as sync:
            await asyncio.to_thread(sync.connect)
            await asyncio.to_thread(sync.send_weights)
            request = asyncio.create_task(generate(engine))
            while not request.done():
                await asyncio.to_thread(train, policy)
                stats = await asyncio.to_thread(sync.send_weights)
                print(f"v{stats.version}: {stats.nnz} changed, pause {stats.commit_s:.3f} s")
            for span in request.result().weight_versions:
                print(f"tokens {span.start} to {span.end} are of v{span.version}")
    engine.shutdown()


async def generate(engine: AsyncLLM) -> Any:
    """The output of one long request."""
    sampling = SamplingParams(max_tokens=200, ignore_eos=True, seed=0)
    async for output in engine.generate(PROMPT, sampling, request_id="long"):
        latest = output.outputs[0]
    return latest


def train(policy: torch.nn.Module) -> None:
    """Stands for an optimizer step: a few elements change."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.view(-1)[:100] *= 1.01


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
