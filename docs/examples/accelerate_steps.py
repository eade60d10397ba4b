"""Hugging Face accelerate: a second process follows every optimizer step.

python docs/examples/accelerate_steps.py
"""

import hashlib
import sys
from contextlib import suppress
from subprocess import Popen
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, sync_after_step
from deltasync.errors import PeerLost
from deltasync.transports import shared_memory


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).to(dtype)


def train() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = model_of(torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    rows = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8)
    model, optimizer, batches = accelerator.prepare(module, optimizer, rows)
    with (
        TemporaryDirectory() as place,
        shared_memory.Sender(f"{place}/socket") as link,
        Popen([sys.executable, __file__, f"{place}/socket"]),
        WeightSender(ModuleSource(module), link) as sender,
    ):
        sender.wait_for_receivers(1)
        sender.send_weights()  # none: both have made the same
        # Of the optimizer within, whose step is taken only when gradients are complete.
        hook = sync_after_step(optimizer.optimizer, sender, on_error="raise")
        for (inputs,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and hook.last_stats is not None:
                print(f"trainer v{hook.last_stats.version} {sha256(module)}", flush=True)


def follow(path: str) -> None:
    model = model_of(torch.bfloat16)
    receiver = WeightReceiver(ModuleTarget(model), shared_memory.Receiver(path))
    with receiver, suppress(PeerLost):  # until the trainer has left
        while True:
            print(f"engine v{receiver.receive_weights()} {sha256(model)}", flush=True)


def sha256(model: nn.Module) -> str:
    """Of all weights as bf16: taken beside the library."""
    weights = torch.cat([weight.detach().bfloat16().ravel() for weight in model.parameters()])
    return hashlib.sha256(weights.view(torch.uint8).numpy().data).hexdigest()


if __name__ == "__main__":
    train() if len(sys.argv) == 1 else follow(sys.argv[1])
