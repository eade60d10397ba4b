"""A trainer here, and `vllm serve` on another machine. See docs/integrations/remote.md.

DELTASYNC_SECRET=... python docs/examples/vllm_remote.py MODEL http://SERVER:8000 --host HERE

MODEL is the checkpoint that the server was started on. VLLM_API_KEY is the server's key, if any.
"""

import argparse
import os

import torch

from deltasync import ModuleSource, SenderOptions
from deltasync.config import network_secret
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.vllm import HttpClient, VllmServer
from deltasync.transports import collective


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train here, and serve on another machine.")
    parser.add_argument("model", help="checkpoint folder, or name on the Hub")
    parser.add_argument("url", help="of the server, as this machine reaches it")
    parser.add_argument("--host", required=True, help="this machine, as the server's reaches it")
    parser.add_argument("--port", type=int, default=29600, help="here, for the server's workers")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl", help="GPUs or CPUs")
    parser.add_argument("--out", help="folder for a checkpoint of the last weights")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if options.backend == "nccl" else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    key = os.environ.get("VLLM_API_KEY")
    client, server = HttpClient(options.url, api_key=key), Http(options.url, api_key=key)
    link = collective.Sender(
        options.host,
        options.port,
        backend=options.backend,
        device=device,
        secret=network_secret(),  # workers read DELTASYNC_SECRET, too
    )
    with EngineSync(
        ModuleSource(policy),
        VllmServer(client),
        link,
        workers=client.workers(),
        paused=client.paused,
        without_routes="reload" if device == "cpu" else "refuse",  # on CPUs vLLM packs matrices
        options=SenderOptions(wire_dtypes={"*": "bfloat16"}),
    ) as sync:
        sync.connect()
        print(f"{client.workers()} workers of {options.url} connected to {link.address}")
        for _ in range(4):
            stats = sync.send_weights()
            print(f"{stats.receivers} workers hold {stats}")
            train(policy, optimizer)
        sync.send_weights()
    print(server.get("weight_info"))
    if options.out:
        policy.bfloat16().save_pretrained(options.out)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out)


def train(policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stands for a step on rewarded rollouts."""
    batch = torch.arange(10, 30, device=next(policy.parameters()).device)[None]
    policy(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main(arguments())
