"""Ranks of one torchrun: the first ones train, the others hold models that follow them.

torchrun --nproc-per-node 4 docs/examples/torchrun_ranks.py

On two nodes, of which the first trains (NODE is 0 there, and 1 on the other):

export DELTASYNC_SECRET=...  # the same on both
torchrun --nnodes 2 --node-rank NODE --rdzv-endpoint 10.0.0.1:29500 --nproc-per-node 2 \
    docs/examples/torchrun_ranks.py --trainers 2 --port 29600

With a GPU for each rank weights are on GPUs and travel over NCCL, else on CPUs over gloo. They
travel in process groups of their own; the default one is that of the ranks that train.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

from deltasync import (
    ModuleSource,
    ModuleTarget,
    SyncStats,
    TrainerGroup,
    TrainerRank,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.config import network_secret
from deltasync.errors import DeltaSyncError, TransportTimeout
from deltasync.transports import collective

_BITS = "deltasync/bits"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def fingerprint(weights: Mapping[str, Any]) -> str:
    """Of all bits of the weights as the ranks that follow hold them."""
    bits = hashlib.sha256()
    for _, tensor in sorted(weights.items()):
        bits.update(tensor.bfloat16().view(torch.uint8).cpu().numpy().tobytes())
    return bits.hexdigest()


class Rank:
    """What torchrun told this process, and where ranks that train listen.

    Rank n listens on two ports from `port` + 2 n; the last two are those where rank 0 listens to
    the others that train. So nobody has to be told where, and a node may come back at any time.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.number, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.trainers, self.port = options.trainers, options.port
        self.checkpoint: Path | None = options.checkpoint
        has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        self.backend: str = "nccl" if has_gpus else "gloo"
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu"
        self.secret = network_secret()  # without one, deltasync warns on a network

    @cached_property
    def store(self) -> Store:
        """That of torchrun, which may outlive a restart of the ranks, with all that is in it."""
        store: Store = next(rendezvous("env://"))[0]
        return store

    def ended(self) -> str | None:
        """The trainer's fingerprint if it has ended; None while it trains, or is away."""
        with suppress(RuntimeError):  # the store is on the trainer's node
            if self.store.check([_BITS]):
                return str(self.store.get(_BITS).decode())
        return None

    def listen(self, place: int, backend: str) -> collective.Sender:
        port = self.port + 2 * place
        host, device = os.environ["MASTER_ADDR"], None if backend != self.backend else self.device
        return collective.Sender(
            host, port, backend=backend, device=device, secret=self.secret, store_port=port + 1
        )

    def connect(self, place: int, backend: str) -> collective.Receiver:
        port = self.port + 2 * place
        host, device = os.environ["MASTER_ADDR"], None if backend != self.backend else self.device
        return collective.Receiver(host, port, backend=backend, device=device, secret=self.secret)

    def load(self) -> dict[str, Any]:
        if self.checkpoint is None or not self.checkpoint.exists():
            return {}
        saved: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        return saved

    def save(self, saved: dict[str, Any]) -> None:
        if self.checkpoint is not None and self.number == 0:
            torch.save(saved, draft := self.checkpoint.with_suffix(".new"))
            draft.replace(self.checkpoint)


def sender_of(rank: Rank, source: ModuleSource) -> WeightSender | TrainerRank:
    link = rank.listen(rank.number, rank.backend)
    if rank.number > 0:
        hub = rank.connect(rank.trainers, "gloo")
        return TrainerRank(source, link, hub, rank=rank.number, world=rank.trainers)
    group = TrainerGroup(rank.listen(rank.trainers, "gloo"), rank.trainers)
    sender = WeightSender(source, link, group=group)
    with suppress(TransportTimeout):  # a node may come later
        sender.wait_for_receivers(rank.world - rank.trainers)
    return sender


def train(rank: Rank, steps: int, step_s: float) -> None:
    """Keeps float32 weights, sharded over the ranks that train."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = PrefixStore(f"trainers/{attempt}", rank.store)
    dist.init_process_group(rank.backend, store=store, rank=rank.number, world_size=rank.trainers)
    torch.manual_seed(0)  # ranks that train begin with the same weights
    model = policy().to(rank.device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    first = 0
    if saved := rank.load():
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=WHOLE,
        )
        first = saved["steps"]
    with sender_of(rank, ModuleSource(model)) as sender:
        try:
            report(rank, first, sender.send_weights())
        except DeltaSyncError as error:  # no node is here that follows
            report(rank, first, error)
        hook = sync_after_step(
            optimizer, sender, callback=lambda done: report(rank, first + hook.steps, done)
        )
        for step in range(first, steps):
            torch.manual_seed(step)
            model(torch.randn(8, 64, device=rank.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights, moments = get_state_dict(model, optimizer, options=WHOLE)
            rank.save({"model": weights, "optimizer": moments, "steps": step + 1})
            time.sleep(step_s)
        if rank.number == 0:
            rank.store.set(_BITS, fingerprint(weights))
    dist.destroy_process_group()


def report(rank: Rank, step: int, done: SyncStats | DeltaSyncError) -> None:
    if rank.number > 0:
        return
    if isinstance(done, DeltaSyncError):
        print(f"step {step}: {type(done).__name__}: {done}", flush=True)
        return
    what = f"{done.density:.1%} changed"
    if done.joined:
        what = f"{done.joined} ranks joined, {done.full_synced} of them by a full sync"
    lost = f"; lost {', '.join(done.lost)}" if done.lost else ""
    print(f"step {step} is v{done.version}: {what}, {done.payload_bytes} bytes{lost}", flush=True)


def follow(rank: Rank) -> None:
    """Keeps bfloat16 weights."""
    model = policy().to(rank.device)
    if saved := rank.load():
        model.load_state_dict(saved["model"])
    model.bfloat16()
    first, *lanes = [rank.connect(n, rank.backend) for n in range(rank.trainers)]
    name = f"rank-{rank.number}"
    with WeightReceiver(ModuleTarget(model), first, lanes=lanes, engine=name) as receiver:
        while (bits := rank.ended()) is None:
            try:
                receiver.receive_weights(timeout_s=600)
            except DeltaSyncError as error:  # the next call connects again
                print(f"rank {rank.number} keeps v{receiver.version}: {error}", flush=True)
    assert fingerprint(model.state_dict()) == bits
    print(f"rank {rank.number} holds the trainer's bits", flush=True)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--trainers", type=int, default=1, help="ranks that train")
    options.add_argument("--port", type=int, default=29600, help="first of 2 * trainers + 2")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--step-s", type=float, default=0.0, help="seconds that a step takes")
    options.add_argument("--checkpoint", type=Path, help="saved after each step, resumed from")
    chosen = options.parse_args()
    rank = Rank(chosen)
    if rank.number < rank.trainers:
        train(rank, chosen.steps, chosen.step_s)
    else:
        follow(rank)


if __name__ == "__main__":
    main()
