"""A trainer beside a running `vllm serve`: it does not import vLLM.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "deltasync"}'
python docs/examples/vllm_http.py MODEL http://localhost:8000

MODEL is a folder of a checkpoint, or its name on the hub.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from deltasync import ModuleSource
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.transports import collective, shared_memory


def main(model: str, url: str) -> None:
    is_gpu = torch.cuda.is_available()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy.to("cuda" if is_gpu else "cpu")
    client, server = HttpClient(url), Http(url)
    with tempfile.TemporaryDirectory() as folder:
        transport = (
            collective.Sender(backend="nccl", device="cuda")  # workers have GPUs of their own
            if is_gpu
            else shared_memory.Sender(Path(folder) / "weights.sock")
        )
        with EngineSync(
            ModuleSource(policy),
            VllmServer(client),
            transport,
            workers=client.workers(),
            paused=client.paused,
            without_routes="reload",  # on CPUs vLLM packs its matrices
        ) as sync:
            sync.connect()
            for _ in range(3):
                stats = sync.send_weights()
                asked = {"model": model, "prompt": list(range(10, 30)), "max_tokens": 8}
                answer = server.post("v1/completions", asked | {"temperature": 0})
                text = answer["choices"][0]["text"]
                print(f"v{stats.version}: {stats.nnz} changed, generated {text!r}")
                train(policy)
    print(server.get("weight_info"))


def train(policy: torch.nn.Module) -> None:
    """Stands for an optimizer step: a few elements change."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.view(-1)[:100] *= 1.01


if __name__ == "__main__":
    main(*sys.argv[1:])
