"""Reinforcement learning on Ray: a trainer, and rollout actors that follow its weights.

python docs/examples/ray_rollouts.py         # on CPUs, over gloo
python docs/examples/ray_rollouts.py --gpus  # a GPU for each actor, over NCCL

Ray places actors, carries samples and restarts what dies. Weights never go through Ray: changes
travel from the trainer to the rollouts in a process group of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import ray
import torch
import torch.nn.functional as F
from ray.exceptions import RayActorError
from torch import Tensor, nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    SyncStats,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import DeltaSyncError
from deltasync.transports import collective

STEPS, CRASH, REUNION = 8, 3, 6  # one rollout dies before step 3, and is waited for before step 6
STATE, ACTIONS, BATCH = 32, 8, 256

Samples = tuple[Tensor, Tensor, Tensor]
"""States (float32 [n, STATE]), the actions taken (int64 [n]), and rewards (float32 [n])."""


def policy() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(STATE, 256), nn.GELU()),
        *(nn.Linear(256, 256), nn.GELU()),
        nn.Linear(256, ACTIONS),
    )


def fingerprint(model: nn.Module) -> str:
    """Of all bits of the weights as rollouts hold them."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().bfloat16().view(torch.uint8).cpu().numpy().tobytes())
    return bits.hexdigest()


class Trainer:
    """Keeps float32 weights. Rollouts connect to its address by themselves, at any time."""

    def __init__(self, backend: Literal["gloo", "nccl"], secret: bytes) -> None:
        self.device = "cuda:0" if backend == "nccl" else "cpu"  # Ray shows an actor its own GPU
        self.policy = policy().to(self.device)
        host = ray.util.get_node_ip_address()
        self.link = collective.Sender(host, backend=backend, device=self.device, secret=secret)
        self.sender = WeightSender(ModuleSource(self.policy), self.link)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-5)
        self.hook = sync_after_step(self.optimizer, self.sender, on_error="raise")

    def address(self) -> tuple[str, int]:
        return self.link.address

    def wait_for_rollouts(self, count: int) -> None:
        self.sender.wait_for_receivers(count, timeout_s=120)

    def send(self) -> SyncStats:
        return self.sender.send_weights()

    def step(self, samples: list[Samples]) -> SyncStats | None:
        """A step of REINFORCE, and the sync after it."""
        parts = zip(*samples, strict=True)
        states, actions, rewards = (torch.cat(part).to(self.device) for part in parts)
        surprise = F.cross_entropy(self.policy(states), actions, reduction="none")
        self.optimizer.zero_grad()
        torch.autograd.backward((surprise * (rewards - rewards.mean())).mean())
        self.optimizer.step()
        return self.hook.last_stats

    def fingerprint(self) -> str:
        return fingerprint(self.policy)


class Rollout:
    """Keeps bfloat16 weights, and samples with them. Once made, it holds the trainer's."""

    def __init__(
        self, name: str, trainer: tuple[str, int], backend: Literal["gloo", "nccl"], secret: bytes
    ) -> None:
        self.device = "cuda:0" if backend == "nccl" else "cpu"
        self.policy = policy().to(self.device, torch.bfloat16)
        link = collective.Receiver(*trainer, backend=backend, device=self.device, secret=secret)
        self.receiver = WeightReceiver(ModuleTarget(self.policy), link, engine=name)
        self.serving = threading.Lock()
        while self.receiver.version is None:  # to Ray the actor is not alive before that
            self.take_sync()
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        try:
            while True:
                self.take_sync()
        finally:  # rejoining would not repair it
            traceback.print_exc()
            os._exit(1)  # Ray starts another

    def take_sync(self) -> None:
        """Receive while samples are made, write between two forward passes."""
        try:
            if self.receiver.stage(timeout_s=3600):
                with self.serving:
                    self.receiver.commit()
        except DeltaSyncError as error:
            print(f"{type(error).__name__}: {error}; rejoining")

    def sample(self) -> Samples:
        states = torch.randn(BATCH, STATE)
        with self.serving, torch.no_grad():
            self.receiver.check_serving()
            logits = self.policy(states.to(self.device, torch.bfloat16)).cpu().float()
        actions = torch.multinomial(logits.softmax(1), 1).squeeze(1)
        best = states.view(BATCH, ACTIONS, -1).sum(2).argmax(1)  # what there is to learn
        return states, actions, (actions == best).float()

    def fingerprint(self) -> str:
        with self.serving:
            return fingerprint(self.policy)

    def crash(self) -> None:
        os._exit(1)


def samples_of(rollouts: list[Any]) -> Iterator[Samples]:
    """Of those that are alive."""
    for pending in [rollout.sample.remote() for rollout in rollouts]:
        with suppress(RayActorError):
            yield ray.get(pending)


def report(done: SyncStats) -> None:
    text = f"v{done.version}: {done.kind}, {done.density:.1%} changed, "
    text += f"{done.payload_bytes} bytes, {done.receivers} rollouts hold it"
    if done.kind == "delta" and done.full_synced:
        text += f", {done.full_synced} of them by a full sync of {done.joined_bytes} bytes"
    for name, reason in done.lost.items():
        text += f"; lost {name}: {reason}"
    print(text)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--gpus", action="store_true", help="give each actor one")
    options.add_argument("--rollouts", type=int, default=3, help="at least 2, one dies")
    chosen = options.parse_args()
    backend = "nccl" if chosen.gpus else "gloo"
    place = {"num_gpus": int(chosen.gpus), "num_cpus": 0}  # more actors than CPUs would not start
    names = [f"rollout-{n}" for n in range(chosen.rollouts)]

    ray.init()
    secret = secrets.token_bytes(32)
    trainer = ray.remote(Trainer).options(**place).remote(backend, secret)
    address = ray.get(trainer.address.remote())
    actor = ray.remote(Rollout).options(**place, max_restarts=-1)
    rollouts = [actor.remote(name, address, backend, secret) for name in names]

    ray.get(trainer.wait_for_rollouts.remote(len(rollouts)))
    report(ray.get(trainer.send.remote()))
    for step in range(1, STEPS + 1):
        if step == CRASH:
            with suppress(RayActorError):
                ray.get(rollouts[-1].crash.remote())
            print(f"{names[-1]} has died; training goes on")
        if step == REUNION:
            ray.get(trainer.wait_for_rollouts.remote(len(rollouts)))
            print(f"{names[-1]} has come back")
        report(ray.get(trainer.step.remote(list(samples_of(rollouts)))))

    # Ray may not have noticed yet that the restarted one is alive.
    held = [rollout.fingerprint.options(max_task_retries=-1).remote() for rollout in rollouts]
    assert set(ray.get(held)) == {ray.get(trainer.fingerprint.remote())}
    print(f"the trainer and {len(rollouts)} rollouts hold the same bits")


if __name__ == "__main__":
    main()
