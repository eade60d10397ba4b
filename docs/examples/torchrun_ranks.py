"""Rank 0 trains, the other ranks hold models that follow it.

torchrun --nproc-per-node 4 docs/examples/torchrun_ranks.py

With a GPU for each rank weights are on GPUs and travel over NCCL, else on CPUs over gloo. They
travel in a process group of their own: the default one is neither made nor used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.rendezvous import rendezvous

from deltasync import (
    ModuleSource,
    ModuleTarget,
    SyncStats,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import PeerLost
from deltasync.transports import collective


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def fingerprint(model: nn.Module) -> str:
    """Of all bits of the weights as the other ranks hold them."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().bfloat16().view(torch.uint8).cpu().numpy().tobytes())
    return bits.hexdigest()


class Rank:
    """What torchrun told this process, and the checkpoint that all ranks start from."""

    def __init__(self, checkpoint: Path | None) -> None:
        self.store, self.number, self.world = next(rendezvous("env://"))
        has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        self.backend: Literal["gloo", "nccl"] = "nccl" if has_gpus else "gloo"
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu"
        # The store may outlive a restart of the ranks, with all that is in it.
        self.attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.checkpoint = checkpoint

    def tell(self, key: str, value: str) -> None:
        self.store.set(f"deltasync/{self.attempt}/{key}", value)

    def hear(self, key: str) -> str:
        """Waits until it has been told."""
        value: bytes = self.store.get(f"deltasync/{self.attempt}/{key}")
        return value.decode()

    def load(self) -> dict[str, Any]:
        if self.checkpoint is None or not self.checkpoint.exists():
            return {}
        saved: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        return saved

    def save(self, saved: dict[str, Any]) -> None:
        if self.checkpoint is not None:
            torch.save(saved, draft := self.checkpoint.with_suffix(".new"))
            draft.replace(self.checkpoint)


def train(rank: Rank, steps: int) -> None:
    """Keeps float32 weights."""
    model = policy().to(rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    first = 0
    if saved := rank.load():
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["steps"]
    link = collective.Sender(os.environ["MASTER_ADDR"], backend=rank.backend, device=rank.device)
    host, port = link.address
    rank.tell("host", host)
    rank.tell("port", str(port))
    with WeightSender(ModuleSource(model), link) as sender:
        sender.wait_for_receivers(rank.world - 1)
        report(sender.send_weights(), first)
        hook = sync_after_step(optimizer, sender, on_error="raise")
        for step in range(first, steps):
            model(torch.randn(8, 64, device=rank.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report(hook.last_stats, step + 1)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            rank.save(state | {"steps": step + 1})
        rank.tell("bits", fingerprint(model))


def report(done: SyncStats | None, steps: int) -> None:
    assert done is not None  # sync_after_step raises otherwise
    what = f"{done.density:.1%} changed"
    if done.joined:
        what = f"{done.joined} ranks joined, {done.full_synced} of them by a full sync"
    print(f"step {steps} is v{done.version}: {what}, {done.payload_bytes} bytes", flush=True)


def follow(rank: Rank) -> None:
    """Keeps bfloat16 weights."""
    model = policy().to(rank.device)
    if saved := rank.load():
        model.load_state_dict(saved["model"])
    model.bfloat16()
    link = collective.Receiver(
        rank.hear("host"), int(rank.hear("port")), backend=rank.backend, device=rank.device
    )
    receiver = WeightReceiver(ModuleTarget(model), link, engine=f"rank-{rank.number}")
    with receiver, suppress(PeerLost):  # the trainer ends
        while True:
            receiver.receive_weights(timeout_s=600)
    assert fingerprint(model) == rank.hear("bits")
    print(f"rank {rank.number} holds the trainer's bits")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--checkpoint", type=Path, help="saved after each step, resumed from")
    chosen = options.parse_args()
    rank = Rank(chosen.checkpoint)
    if rank.number == 0:
        train(rank, chosen.steps)
    else:
        follow(rank)


if __name__ == "__main__":
    main()
