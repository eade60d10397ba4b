"""Process A: warms the policy up, trains it by GRPO, and syncs it after every optimizer step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from deltasync import (
    ModuleSource,
    SyncStats,
    WeightSender,
    subscribe,
    sync_after_step,
)
from deltasync.demo.grpo import group_advantages, grpo_loss
from deltasync.demo.policy import Policy, PolicySize
from deltasync.demo.report import Report, Score, Summary, VersionRecord
from deltasync.demo.rollout import MAX_THREADS
from deltasync.demo.task import SortTask
from deltasync.errors import PeerLost
from deltasync.observe.run_log import RunLog
from deltasync.transports.address import Address, listen

START_TIMEOUT_S, EXIT_TIMEOUT_S = 120.0, 10.0
BETAS = (0.9, 0.95)
NUM_SEEDS = 2**32  # torch's CPU generator ignores higher bits
EVALUATION_SEED = NUM_SEEDS - 1  # not a --seed: its prompts are not those of the training


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Everything that a run depends on.

    Attributes:
        steps: Optimizer steps of GRPO; each makes one version.
        learning_rate: Learning rate of GRPO, after ten steps of linear warm-up.
        warm_up_steps: Supervised steps before the first sync; likewise `warm_up_*`.
        num_prompts: Prompts of one GRPO step, each answered `group_size` times.
        num_evaluation_prompts: Prompts of the evaluation, the same before and after.
        log: File to which a `RunLog` writes; None for none.
    """

    steps: int
    seed: int
    learning_rate: float
    task: SortTask = field(default_factory=SortTask)
    size: PolicySize = field(default_factory=PolicySize)
    warm_up_steps: int = 120
    warm_up_batch: int = 32
    warm_up_learning_rate: float = 7e-4
    num_prompts: int = 32
    group_size: int = 8
    num_evaluation_prompts: int = 512
    log: Path | None = None

    @classmethod
    def quick(cls, **changes: Any) -> Self:
        """A policy and a task so small that a run takes seconds: for tests."""
        small: dict[str, Any] = {
            "task": SortTask(num_digits=4),
            "size": PolicySize(width=64, num_heads=2, num_layers=2),
            "warm_up_steps": 60,
            "warm_up_learning_rate": 2e-3,
            "num_prompts": 8,
            "num_evaluation_prompts": 256,
        }
        return cls(**(small | changes))


class RolloutProcess:
    """Process B, and what A asks it. It ends with the block, however the block ends.

    B is in a session of its own, so that Ctrl-C reaches A alone. Calls raise PeerLost if B is gone.
    """

    def __init__(self, config: DemoConfig, address: Address) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deltasync.demo.rollout"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        seed = config.seed + 1  # other weights than A's, until the full sync
        made = {"num_digits": config.task.num_digits, "size": asdict(config.size), "seed": seed}
        self._tell(made | {"address": address.model_dump()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, prompts: Tensor, seed: int, *, syncs: bool) -> None:
        """Let it answer prompts, int64[B, prompt_length].

        Args:
            prompts: The prompts.
            seed: Of the sampler.
            syncs: Whether it first waits for a sync, which must follow.
        """
        self._tell({"prompts": prompts.tolist(), "seed": seed, "syncs": syncs})

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last `ask`.

        Returns:
            Lists of B: "answers" of int64[T], their "log_probs" of float32[T] under the policy that
            B holds, and "rewards"; and the "sha256" of B's weights.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise PeerLost("the rollout process is gone")
        found: dict[str, Any] = json.loads(line)
        return found

    def _tell(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError as error:
            raise PeerLost("the rollout process is gone") from error


class Trainer:
    """The policy in fp32, and what trains it."""

    def __init__(self, config: DemoConfig, rollout: RolloutProcess, report: Report) -> None:
        torch.manual_seed(config.seed)
        self.config, self.rollout, self.report = config, rollout, report
        self.policy = Policy(config.task, config.size)
        self.generator = torch.Generator().manual_seed(config.seed)

    def warm_up(self) -> None:
        """Train on solutions, until the policy finds a good part of them itself."""
        config, steps = self.config, self.config.warm_up_steps
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), config.warm_up_learning_rate, betas=BETAS, weight_decay=0.01
        )
        # Linear warm-up over 20 steps, linear cool-down over the second half.
        schedule = LambdaLR(optimizer, lambda i: min(1, (i + 1) / 20, (steps - i) / (0.5 * steps)))
        for step in range(steps):
            prompts = config.task.sample_prompts(config.warm_up_batch, self.generator)
            loss = -self.policy.answer_log_probs(prompts, config.task.solutions(prompts)).mean()
            self._step(optimizer, loss)
            schedule.step()
            self.report.warm_up(step + 1, steps, loss.item())

    def train(self, sender: WeightSender, first: SyncStats) -> None:
        """GRPO: each version generates the rollouts of the step that makes the next version.

        Args:
            sender: Has sent the weights as they are.
            first: What that sync did.
        """
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), self.config.learning_rate, betas=BETAS, weight_decay=0.0
        )
        schedule = LinearLR(optimizer, start_factor=0.1, total_iters=10)
        hook = sync_after_step(optimizer, sender, on_error="raise")
        prompts = self._ask(syncs=False)
        for step in range(self.config.steps + 1):
            found = self.rollout.answer()
            rewards = torch.tensor(found["rewards"])
            same = found["sha256"] == self.policy.sha256()
            stats, reward = hook.last_stats or first, rewards.mean().item()
            self.report.version(VersionRecord(stats, reward, same))
            if step == self.config.steps:  # the last version is only evaluated
                return
            advantages = group_advantages(rewards, self.config.group_size)
            answers = torch.tensor(found["answers"])
            log_probs = self.policy.answer_log_probs(prompts, answers)
            loss = grpo_loss(log_probs, torch.tensor(found["log_probs"]), advantages)
            prompts = self._ask(syncs=True)
            self._step(optimizer, loss)  # in which the hook sends the weights
            schedule.step()

    def _ask(self, *, syncs: bool) -> Tensor:
        """Let process B answer new prompts. Returns them, the rows of a group adjacent."""
        prompts = self.config.task.sample_prompts(self.config.num_prompts, self.generator)
        prompts = prompts.repeat_interleave(self.config.group_size, dim=0)
        seed = int(torch.randint(NUM_SEEDS, (), generator=self.generator))
        self.rollout.ask(prompts, seed, syncs=syncs)
        return prompts

    def ask_evaluation(self, *, syncs: bool) -> None:
        """Let process B answer the prompts of the evaluation, which are always the same."""
        generator = torch.Generator().manual_seed(EVALUATION_SEED)
        prompts = self.config.task.sample_prompts(self.config.num_evaluation_prompts, generator)
        self.rollout.ask(prompts, EVALUATION_SEED, syncs=syncs)

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        optimizer.step()


def run(config: DemoConfig, report: Report) -> Summary:
    """Run the whole demo. Both processes have ended when it returns or raises."""
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    started = time.perf_counter()
    with ExitStack() as stack:
        if config.log is not None:
            stack.enter_context(subscribe(stack.enter_context(RunLog(config.log))))
        folder = stack.enter_context(TemporaryDirectory(prefix="deltasync-"))
        transport, address = listen("shared_memory", path=Path(folder) / "weights.sock")
        stack.enter_context(transport)
        rollout = stack.enter_context(RolloutProcess(config, address))
        trainer = Trainer(config, rollout, report)
        trainer.warm_up()
        warm = time.perf_counter()
        source = ModuleSource(trainer.policy)
        with WeightSender(source, transport) as sender:
            trainer.ask_evaluation(syncs=True)
            sender.wait_for_receivers(1, timeout_s=START_TIMEOUT_S)
            stats = sender.send_weights()
            first = rollout.answer()
            report.checkpoints["first"] = trainer.policy.weights()
            trainer.train(sender, stats)
            report.checkpoints["last"] = trainer.policy.weights()
            trainer.ask_evaluation(syncs=False)
            last = rollout.answer()
        return Summary(
            before=Score.of(first["rewards"]),
            after=Score.of(last["rewards"]),
            trainer_sha256=trainer.policy.sha256(),
            rollout_sha256=last["sha256"],
            warm_up_s=warm - started,
            training_s=time.perf_counter() - warm,
        )
