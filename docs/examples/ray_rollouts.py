"""Reinforcement learning on Ray: a trainer of two ranks, and engines that come and go.

python docs/examples/ray_rollouts.py         # on CPUs, over gloo
python docs/examples/ray_rollouts.py --gpus  # a GPU for each actor, over NCCL
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from deltasync import ModuleSource, ModuleTarget, SyncStats, WeightSender, sync_after_step
from deltasync.integrations.ray import Rendezvous

RANKS, ENGINES, STEPS = 2, 3, 30
GPUS = "--gpus" in sys.argv
DEVICE = "cuda:0" if GPUS else "cpu"  # Ray shows an actor its own GPU


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8)).to(DEVICE)


class Trainer:
    """A rank of an FSDP2 trainer with float32 weights."""

    def __init__(self, meeting: Rendezvous, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def address(self) -> str:  # for torch's own process group
        with socket.create_server((host := ray.util.get_node_ip_address(), 0)) as free:
            return f"tcp://{host}:{free.getsockname()[1]}"

    def start(self, address: str, engines: int) -> SyncStats:
        dist.init_process_group(
            self.meeting.backend, address, rank=self.rank, world_size=self.meeting.ranks
        )
        fully_shard(model := policy())
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-5)
        sender = self.meeting.sender(ModuleSource(model), rank=self.rank)
        self.hook = sync_after_step(self.optimizer, sender, on_error="raise")
        if isinstance(sender, WeightSender):  # rank 0
            sender.wait_for_receivers(engines)
        return sender.send_weights()

    def step(self, samples: list[tuple[Tensor, Tensor]]) -> SyncStats | None:
        """Learn from what was rewarded, and sync."""
        parts = (torch.cat(part)[self.rank :: RANKS] for part in zip(*samples, strict=True))
        states, actions = (part.to(DEVICE) for part in parts)
        torch.autograd.backward(F.cross_entropy(self.model(states), actions))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.hook.last_stats


class Engine:
    """Samples with bfloat16 weights that follow the trainer."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.model = policy().bfloat16()
        self.weights = meeting.follow(ModuleTarget(self.model))  # to Ray it is not alive before

    def sample(self) -> tuple[Tensor, Tensor]:
        states = torch.randn(256, 32)
        with self.weights.serving(), torch.no_grad():
            logits = self.model(states.to(DEVICE, torch.bfloat16)).float().cpu()
        actions = torch.multinomial(logits.softmax(1), 1).squeeze(1)
        good = actions == states[:, :8].argmax(1)
        return states[good], actions[good]


def main() -> None:
    ray.init()
    need = {"num_gpus": 1} if GPUS else {"num_cpus": 0.1}
    group = placement_group([{"GPU": 1} if GPUS else {"CPU": 0.1}] * RANKS)
    meeting = Rendezvous(ranks=RANKS, backend="nccl" if GPUS else "gloo")
    trainer = [
        ray.remote(Trainer)
        .options(**need, scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank))
        .remote(meeting, rank)
        for rank in range(RANKS)
    ]
    engine = ray.remote(Engine).options(**need, max_restarts=-1)
    engines = [engine.remote(meeting) for _ in range(ENGINES)]

    address = ray.get(trainer[0].address.remote())
    print(ray.get([rank.start.remote(address, ENGINES) for rank in trainer])[0])
    for step in range(1, STEPS + 1):
        if step == 2:
            ray.kill(engines[0], no_restart=False)  # Ray starts it again: it finds its way back
        if step == 4:
            ray.kill(engines.pop())  # for good
            engines += [engine.remote(meeting) for _ in range(2)]
        pending, samples = [engine.sample.remote() for engine in engines], []
        for sample in ray.wait(pending, num_returns=len(pending), timeout=2)[0]:
            with suppress(RayActorError):  # it has died; one that starts waits for the next sync
                samples.append(ray.get(sample))
        print(ray.get([rank.step.remote(samples) for rank in trainer])[0])


if __name__ == "__main__":
    main()
