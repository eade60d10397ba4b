"""Lightning, and a second process that follows every optimizer step: run it without arguments."""

import hashlib
import sys
from contextlib import suppress
from functools import partial
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender, sync_after_step
from deltasync.errors import PeerLost
from deltasync.transports import shared_memory


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).to(dtype)


class Policy(LightningModule):
    """What is trained; engines hold its `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of(torch.float32)

    def training_step(self, batch: list[Tensor]) -> Any:
        return self.model(*batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4)


def on_train_start(sender: WeightSender, trainer: Trainer, policy: Policy) -> None:
    def say(stats: Any) -> None:
        print(f"trainer v{stats.version} {sha256(policy.model)}", flush=True)

    sender.wait_for_receivers(1)
    sender.send_weights()  # none: both have made the same
    sync_after_step(trainer.optimizers, sender, on_error="raise", callback=say)


def train() -> None:
    policy, rows = Policy(), TensorDataset(torch.randn(64, 64))
    with (
        TemporaryDirectory() as place,
        shared_memory.Sender(f"{place}/socket") as link,
        Popen([sys.executable, __file__, f"{place}/socket"]),
        WeightSender(ModuleSource(policy.model), link) as sender,
    ):
        sync = LambdaCallback(on_train_start=partial(on_train_start, sender))
        short = {"max_epochs": 1, "accumulate_grad_batches": 2, "accelerator": "cpu"}
        Trainer(callbacks=[sync], default_root_dir=place, **short).fit(policy, DataLoader(rows, 8))


def follow(path: str) -> None:
    model = model_of(torch.bfloat16)
    receiver = WeightReceiver(ModuleTarget(model), shared_memory.Receiver(path))
    with receiver, suppress(PeerLost):  # until the trainer has left
        while True:
            print(f"engine v{receiver.receive_weights()} {sha256(model)}", flush=True)


def sha256(model: nn.Module) -> str:
    weights = torch.cat([weight.detach().bfloat16().ravel() for weight in model.parameters()])
    return hashlib.sha256(weights.view(torch.uint8).numpy().data).hexdigest()


if __name__ == "__main__":
    train() if len(sys.argv) == 1 else follow(sys.argv[1])
