"""vLLM's offline engine and its trainer in one process, by turns.

python docs/examples/vllm_offline.py MODEL

MODEL is a folder of a checkpoint, or its name on the hub.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from deltasync import ModuleSource
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.vllm import OfflineClient, VllmServer
from deltasync.transports import cuda_ipc, shared_memory

PROMPT = {"prompt_token_ids": list(range(10, 30))}


def main(model: str) -> None:
    is_gpu = torch.cuda.is_available()
    llm = LLM(
        model=model,
        dtype="bfloat16",
        gpu_memory_utilization=0.4,  # the trainer lives on the same GPU
        weight_transfer_config={"backend": "deltasync"},
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy.to("cuda" if is_gpu else "cpu")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    sampling = SamplingParams(max_tokens=16, seed=0)
    link = cuda_ipc if is_gpu else shared_memory
    with tempfile.TemporaryDirectory() as folder:
        transport = link.Sender(Path(folder) / "weights.sock")
        with EngineSync(
            ModuleSource(policy),
            VllmServer(OfflineClient(llm)),
            transport,
            without_routes="reload",  # on CPUs vLLM packs its matrices
        ) as sync:
            sync.connect()
            for _ in range(3):
                stats = sync.send_weights()
                [output] = llm.generate([PROMPT], sampling, use_tqdm=False)
                tokens = output.outputs[0].token_ids
                print(f"v{stats.version}: {stats.density:.4%} changed, generated {list(tokens)}")
                train(policy, optimizer, [*PROMPT["prompt_token_ids"], *tokens])


def train(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: list[int]) -> None:
    """Make what was generated likelier, as if it had been rewarded."""
    batch = torch.tensor([tokens], device=next(policy.parameters()).device)
    policy(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
