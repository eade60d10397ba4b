"""A trainer beside a running SGLang server that waits for its initial weights.

python -m sglang.launch_server --model-path MODEL --load-format dummy \
    --checkpoint-engine-wait-weights-before-ready
torchrun --nproc-per-node 1 docs/examples/parameter_server.py MODEL http://localhost:30000

A ParameterServer of checkpoint-engine brings the initial weights, deltasync every version after.
MODEL is a folder of a checkpoint, or its name on the hub. On GPUs both run on the same one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from checkpoint_engine.ps import ParameterServer
from transformers import AutoModelForCausalLM

from deltasync import ModuleSource
from deltasync.integrations.engine_sync import EngineSync
from deltasync.integrations.http import Http
from deltasync.integrations.sglang import SglangServer
from deltasync.transports import cuda_ipc, shared_memory


def main(model: str, url: str) -> None:
    is_gpu = torch.cuda.is_available()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy.to("cuda" if is_gpu else "cpu")
    bring(policy, url)
    server, link = SglangServer(url), cuda_ipc if is_gpu else shared_memory
    with tempfile.TemporaryDirectory() as folder:
        transport = link.Sender(Path(folder) / "weights.sock")
        with EngineSync(
            ModuleSource(policy), server, transport, workers=server.workers, paused=server.paused
        ) as sync:
            for _ in range(3):
                stats = sync.send_weights()
                print(f"v{stats.version}: {stats.nnz} changed, {stats.payload_bytes} bytes sent")
                train(policy)
    print(Http(url).get("model_info")["weight_version"])


def bring(policy: torch.nn.Module, url: str) -> None:
    """All of the weights, by a ParameterServer; the server is ready then."""
    weights = {name: tensor.cpu() for name, tensor in policy.state_dict().items()}
    parameters = ParameterServer()
    parameters.register_checkpoint("initial", named_tensors=weights)
    parameters.gather_metas("initial")

    def ask(sockets: list[tuple[str, str]]) -> None:
        Http(url).post("update_weights_from_ipc", {"zmq_handles": dict(sockets)})

    parameters.update("initial", ask)
    parameters.unregister_checkpoint("initial")


def train(policy: torch.nn.Module) -> None:
    """Stands for an optimizer step: a few elements change."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.view(-1)[:100] *= 1.01


if __name__ == "__main__":
    main(*sys.argv[1:])
