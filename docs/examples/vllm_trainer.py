"""A trainer that drives vLLM's own interface, beside a running `vllm serve`.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "deltasync"}'
python docs/examples/vllm_trainer.py MODEL http://localhost:8000

MODEL is a folder of a checkpoint, or its name on the hub. Only the init info is deltasync's.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from deltasync import SenderOptions
from deltasync.integrations.http import Http
from deltasync.integrations.vllm_trainer import DeltaSyncTrainerInitInfo


def main(model: str, url: str) -> None:
    is_gpu = torch.cuda.is_available()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.to("cuda" if is_gpu else "cpu")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaSyncTrainerInitInfo(
            "nccl" if is_gpu else "shared_memory",
            settings={
                "without_routes": "reload",  # on CPUs vLLM packs its matrices, from a bf16 copy
                "options": SenderOptions(wire_dtypes={"*": "bfloat16"}),
            },
            rank=0,
        ),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(policy),
    )
    server = Http(url)
    for _ in range(3):
        engine.send_weights()
        asked = {"model": model, "prompt": list(range(10, 30)), "max_tokens": 8}
        answer = server.post("v1/completions", asked | {"temperature": 0})
        stats = engine.last_stats
        print(f"v{stats.version}: {stats.density:.4%} changed, {answer['choices'][0]['text']!r}")
        train(policy, optimizer)
    engine.shutdown()
    print(server.get("weight_info"))


def train(policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stands for a step on rewarded rollouts."""
    batch = torch.arange(10, 30, device=next(policy.parameters()).device)[None]
    policy(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
