"""Process A: warms the policy up, trains it by GRPO, and syncs it after every optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from deltasync import (
    ModuleSource,
    SenderOptions,
    SyncStats,
    WeightSender,
    subscribe,
    sync_after_step,
)
from deltasync import Policy as SendPolicy
from deltasync.demo.grpo import group_advantages, grpo_loss
from deltasync.demo.link import Link, LinkError, Message
from deltasync.demo.policy import Policy, PolicySize, has_fast_bf16
from deltasync.demo.processes import TransportName, rollout_process, send_transport, use_few_threads
from deltasync.demo.records import Checkpoint, Evaluation, Score, Summary, VersionRecord, WarmUpStep
from deltasync.demo.task import SortTask
from deltasync.observe.run_log import RunLog
from deltasync.store.sender import PublishStats, StoreSender
from deltasync.transports.address import Address

START_TIMEOUT_S = 120.0
# Index and value of a changed element take as many bytes as three elements of a dense patch. The
# default policy sends dense patches sooner, to save time, which hardly matters for a small model.
FEWEST_BYTES = SenderOptions(policy=SendPolicy(dense_above=1 / 3), report_density="layer")
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
        store: Folder to which each version is published, as bf16, besides; None for none.
        log: File to which a `RunLog` writes; None for none.
    """

    steps: int
    seed: int
    learning_rate: float
    transport: TransportName
    task: SortTask = field(default_factory=SortTask)
    size: PolicySize = field(default_factory=PolicySize)
    warm_up_steps: int = 120
    warm_up_batch: int = 32
    warm_up_learning_rate: float = 7e-4
    num_prompts: int = 32
    group_size: int = 8
    num_evaluation_prompts: int = 512
    store: Path | None = None
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


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What process B generated for one batch of prompts; B rows, T tokens of answer.

    Attributes:
        prompts: int64[B, prompt_length]; the rows of a group are adjacent.
        answers: int64[B, T].
        log_probs: float32[B, T], of the answers under the policy that B held.
        rewards: float32[B].
        seconds: Duration of the generation.
    """

    prompts: Tensor
    answers: Tensor
    log_probs: Tensor
    rewards: Tensor
    seconds: float


class RolloutClient:
    """The requests of process A to process B."""

    def __init__(self, link: Link, config: DemoConfig, address: Address) -> None:
        self._link = link
        start = {
            "num_digits": config.task.num_digits,
            "size": asdict(config.size),
            "seed": config.seed + 1,  # other weights than A's, until the full sync
            "address": address.model_dump(),
        }
        link.send(Message("start", start))

    def receive_weights(self) -> None:
        """Let it wait for a sync, which must follow."""
        self._link.send(Message("receive_weights"))

    def generate(self, prompts: Tensor, seed: int | None) -> Rollouts:
        """Answers sampled with `seed`, or greedy ones for None, and their rewards."""
        request = Message("generate", {"seed": seed, "prompts": prompts.tolist()})
        answer = self._link.request(request)
        try:
            answers, log_probs, rewards = (
                torch.tensor(answer.values[name]) for name in ("answers", "log_probs", "rewards")
            )
            return Rollouts(prompts, answers, log_probs, rewards, answer.values["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise LinkError(f"not rollouts: {answer.kind}") from error

    def sha256(self) -> str:
        """Return the SHA-256 of the weights that it holds."""
        return str(self._link.request(Message("sha256")).values["hex"])


class Trainer:
    """The policy in fp32, and what trains it."""

    def __init__(self, config: DemoConfig, client: RolloutClient) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.client = client
        self.policy = Policy(config.task, config.size)
        self.generator = torch.Generator().manual_seed(config.seed)

    def warm_up(self) -> Iterator[WarmUpStep]:
        """Train on solutions, until the policy finds a good part of them itself."""
        config, steps = self.config, self.config.warm_up_steps
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), config.warm_up_learning_rate, betas=BETAS, weight_decay=0.01
        )
        # Linear warm-up over 20 steps, linear cool-down over the second half.
        schedule = LambdaLR(optimizer, lambda i: min(1, (i + 1) / 20, (steps - i) / (0.5 * steps)))
        for step in range(steps):
            prompts = config.task.sample_prompts(config.warm_up_batch, self.generator)
            loss = -self._log_probs(prompts, config.task.solutions(prompts)).mean()
            self._step(optimizer, loss)
            schedule.step()
            yield WarmUpStep(step + 1, steps, loss.item())

    def train(
        self, sender: WeightSender, first: SyncStats, publish: Callable[[], PublishStats | None]
    ) -> Iterator[VersionRecord]:
        """GRPO: each version generates the rollouts of the step that makes the next version.

        Args:
            sender: Has sent the weights as they are.
            first: What that sync did.
            publish: Publishes the weights as they are to a store, if there is one.
        """
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), self.config.learning_rate, betas=BETAS, weight_decay=0.0
        )
        schedule = LinearLR(optimizer, start_factor=0.1, total_iters=10)
        handle = sync_after_step(optimizer, sender, on_error="raise")
        for step in range(self.config.steps + 1):
            rollouts = self._rollouts()
            reward = rollouts.rewards.mean().item()
            stats = handle.last_stats or first
            same = self.client.sha256() == self.policy.sha256()
            yield VersionRecord(
                stats=stats,
                reward=reward,
                verified=same,
                rollout_s=rollouts.seconds,
                published=publish(),
            )
            if step == self.config.steps:  # the last version is only evaluated
                return
            advantages = group_advantages(rollouts.rewards, self.config.group_size)
            log_probs = self._log_probs(rollouts.prompts, rollouts.answers)
            loss = grpo_loss(log_probs, rollouts.log_probs, advantages)
            self.client.receive_weights()  # the hook sends them, in the optimizer's step
            self._step(optimizer, loss)
            schedule.step()

    def evaluate(self) -> Evaluation:
        """Scores of the weights that process B holds, always on the same prompts."""
        generator = torch.Generator().manual_seed(EVALUATION_SEED)
        prompts = self.config.task.sample_prompts(self.config.num_evaluation_prompts, generator)
        sampled = self.client.generate(prompts, EVALUATION_SEED)
        greedy = self.client.generate(prompts, None)
        return Evaluation(Score.of(sampled.rewards), Score.of(greedy.rewards))

    def _rollouts(self) -> Rollouts:
        prompts = self.config.task.sample_prompts(self.config.num_prompts, self.generator)
        seed = int(torch.randint(NUM_SEEDS, (), generator=self.generator))
        return self.client.generate(prompts.repeat_interleave(self.config.group_size, dim=0), seed)

    def _log_probs(self, prompts: Tensor, answers: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bf16()):
            return self.policy.answer_log_probs(prompts, answers)

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        optimizer.step()


def run(config: DemoConfig) -> Generator[WarmUpStep | Checkpoint | VersionRecord | Summary]:
    """Run the whole demo and yield its events. Close it to end both processes."""
    use_few_threads()
    started = time.perf_counter()
    with (
        _logged(config.log),
        send_transport(config.transport) as (transport, address),
        rollout_process() as link,
    ):
        client = RolloutClient(link, config, address)
        trainer = Trainer(config, client)
        yield from trainer.warm_up()
        warm = time.perf_counter()
        source = ModuleSource(trainer.policy)
        with WeightSender(source, transport, options=FEWEST_BYTES) as sender:
            client.receive_weights()
            sender.wait_for_receivers(1, timeout_s=START_TIMEOUT_S)
            first = sender.send_weights()
            yield Checkpoint("first", trainer.policy.weights())
            before = trainer.evaluate()
            yield from trainer.train(sender, first, _publisher(source, config))
            yield Checkpoint("last", trainer.policy.weights())
            after = trainer.evaluate()
        yield Summary(
            before=before,
            after=after,
            trainer_sha256=trainer.policy.sha256(),
            rollout_sha256=client.sha256(),
            warm_up_s=warm - started,
            training_s=time.perf_counter() - warm,
        )


@contextmanager
def _logged(path: Path | None) -> Iterator[None]:
    """Inside, every sync of this process is logged."""
    if path is None:
        yield
        return
    with RunLog(path) as log, subscribe(log):
        yield


def _publisher(source: ModuleSource, config: DemoConfig) -> Callable[[], PublishStats | None]:
    """Publishes the source to the demo's store, as a run of its own."""
    if config.store is None:
        return lambda: None
    options = FEWEST_BYTES.model_copy(
        update={"compression": "gap", "wire_dtypes": {"*": "bfloat16"}}
    )
    return StoreSender(source, config.store, options=options).publish
