"""Process B: holds the policy in bf16, receives its weights and generates the rollouts.

Run as `python -m deltasync.demo.rollout FD`, with FD one end of a socket pair to process A.
What it does follows from the messages on that link: see `Rollout.serve`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from copy import deepcopy

import torch
from torch import Generator

from deltasync import ModuleTarget, WeightReceiver
from deltasync.demo.link import Link, LinkClosed, LinkError, Message
from deltasync.demo.policy import Policy, PolicySize, has_fast_bf16
from deltasync.demo.processes import use_few_threads
from deltasync.demo.task import SortTask
from deltasync.errors import PeerLost
from deltasync.transports.address import Address

SYNC_TIMEOUT_S = 120.0


class Rollout:
    """The policy and its receiver, made from the first message.

    Attributes:
        policy: The bf16 weights that syncs write.
        sampler: What generates: the policy itself, or an fp32 copy where bf16 is slow.
    """

    def __init__(self, start: Message) -> None:
        self.task = SortTask(start.values["num_digits"])
        torch.manual_seed(start.values["seed"])  # the weights are replaced by the full sync
        self.policy = Policy(self.task, PolicySize(**start.values["size"])).bfloat16()
        self.sampler = self.policy if has_fast_bf16() else deepcopy(self.policy).float()
        link = Address(**start.values["address"]).receiver(torch.device("cpu"))
        self.receiver = WeightReceiver(ModuleTarget(self.policy), link, engine="rollout")

    def receive_weights(self) -> None:
        """Take part in one sync. No answer is sent: the trainer sees the sync itself."""
        self.receiver.receive_weights(timeout_s=SYNC_TIMEOUT_S)
        if self.sampler is not self.policy:
            self.sampler.load_state_dict(self.policy.state_dict())

    def generate(self, request: Message) -> Message:
        """Answer the prompts and verify the answers."""
        self.receiver.check_serving()
        started = time.perf_counter()
        prompts = torch.tensor(request.values["prompts"])
        answers, log_probs = self.sampler.sample(prompts, _generator(request.values["seed"]))
        rewards = self.task.rewards(prompts, answers)
        found = {"answers": answers, "log_probs": log_probs, "rewards": rewards}
        values = {name: tensor.tolist() for name, tensor in found.items()}
        return Message("rollouts", values | {"seconds": time.perf_counter() - started})

    def serve(self, link: Link) -> None:
        """Do what the messages say until the link is closed."""
        while True:
            request = link.receive()
            match request.kind:
                case "receive_weights":
                    self.receive_weights()
                case "generate":
                    link.send(self.generate(request))
                case "sha256":
                    link.send(Message("sha256", {"hex": self.policy.sha256()}))
                case kind:
                    raise LinkError(f"unknown request {kind}")


def _generator(seed: int | None) -> Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


def main() -> None:
    """Serve until process A closes the link or dies."""
    use_few_threads()
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(LinkClosed, PeerLost):
        rollout = Rollout(link.receive())
        with rollout.receiver:
            rollout.serve(link)


if __name__ == "__main__":
    main()
