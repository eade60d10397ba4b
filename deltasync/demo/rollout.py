"""Process B: holds the policy in bf16, receives its weights and generates the rollouts.

`python -m deltasync.demo.rollout` reads lines of JSON from stdin. The first one says what to make.
Each later one has prompts, and is answered by a line on stdout. The weights come through deltasync.
The process ends when stdin is closed, however process A ends.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch

from deltasync import ModuleTarget, WeightReceiver
from deltasync.demo.policy import Policy, PolicySize
from deltasync.demo.task import SortTask
from deltasync.errors import PeerLost
from deltasync.transports.address import Address

SYNC_TIMEOUT_S = 120.0
MAX_THREADS = 4  # the policy is small: more slow it down


class Rollout:
    """The policy in bf16 and its receiver.

    Attributes:
        policy: The weights that syncs write.
        sampler: What generates: an fp32 copy of them, which is faster on most CPUs.
    """

    def __init__(self, start: dict[str, Any]) -> None:
        self.task = SortTask(start["num_digits"])
        torch.manual_seed(start["seed"])  # the weights are replaced by the full sync
        self.policy = Policy(self.task, PolicySize(**start["size"])).bfloat16()
        self.sampler = deepcopy(self.policy).float()
        link = Address(**start["address"]).receiver(torch.device("cpu"))
        self.receiver = WeightReceiver(ModuleTarget(self.policy), link, engine="rollout")

    def answer(self, prompts: list[list[int]], seed: int, syncs: bool) -> dict[str, Any]:
        """Take part in a sync first if asked to, answer the prompts, and verify the answers."""
        if syncs:
            self.receiver.receive_weights(timeout_s=SYNC_TIMEOUT_S)
            self.sampler.load_state_dict(self.policy.state_dict())
        self.receiver.check_serving()
        generator = torch.Generator().manual_seed(seed)
        answers, log_probs = self.sampler.sample(torch.tensor(prompts), generator)
        rewards = self.task.rewards(torch.tensor(prompts), answers)
        return {
            "answers": answers.tolist(),
            "log_probs": log_probs.tolist(),
            "rewards": rewards.tolist(),
            "sha256": self.policy.sha256(),
        }


def main() -> None:
    """Serve until process A closes stdin or dies."""
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    if not (start := sys.stdin.readline()):
        return
    with suppress(PeerLost):
        rollout = Rollout(json.loads(start))
        with rollout.receiver:
            for line in sys.stdin:
                answer = rollout.answer(**json.loads(line))
                try:
                    print(json.dumps(answer), flush=True)
                except BrokenPipeError:
                    os._exit(0)  # process A is gone, and nobody reads what is in the buffer


if __name__ == "__main__":
    main()
