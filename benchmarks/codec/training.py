"""A small language model, pre-trained, and then trained by policy gradient with AdamW.

The model computes in float32 with bfloat16 weights. The optimizer's weights are float32 masters
that begin at a bfloat16 checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.codec.text import Text
from deltasync.demo.grpo import group_advantages, grpo_loss
from deltasync.demo.policy import Policy, PolicySize

_PROMPTS, _ANSWERS_EACH = 4, 4
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model is and how long it learns.

    Attributes:
        policy: Width, heads and layers.
        vocabulary_size: Of embedding and head, which are not tied.
        lessons: Steps of pre-training, each on `pieces` pieces of text.
        warm_up: Steps of policy gradient before the first that is compared: AdamW's first ones are
            its largest.
    """

    policy: PolicySize
    vocabulary_size: int
    lessons: int
    pieces: int = 32
    warm_up: int = 10


SIZES = {
    "full": Size(PolicySize(768, 12, 12), 12_288, lessons=60),
    "quick": Size(PolicySize(288, 6, 5), 8_704, lessons=40),
    "tiny": Size(PolicySize(64, 2, 2), 512, lessons=8, pieces=4, warm_up=2),
}


class Training:
    """A model, the bfloat16 checkpoint that its pre-training ends with, and runs from there.

    Attributes:
        checkpoint: Weights after it.
    """

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self._size, self._text = size, Text.of(size.vocabulary_size)
        # A text has what a policy asks of its task.
        self._policy = Policy(self._text, size.policy)  # type: ignore[arg-type]
        head = self._policy.head
        head.weight = nn.Parameter(torch.randn_like(head.weight) * size.policy.width**-0.5)
        masters = [weight.detach().clone() for weight in self._policy.parameters()]
        self._pretrain(masters)
        self.checkpoint = [weight.bfloat16() for weight in masters]

    def versions(self, lr: float, num_steps: int) -> Iterator[Weights]:
        """What an engine holds after the warm-up and after each of `num_steps` steps.

        Yields:
            bfloat16 weights by name; copies.
        """
        kept = [weight.float() for weight in self.checkpoint]
        optimizer = torch.optim.AdamW(kept, lr=lr, weight_decay=0, fused=True)
        generator = torch.Generator().manual_seed(1)
        for step in range(self._size.warm_up + num_steps + 1):
            if step:
                self._step(kept, optimizer, lambda: self._policy_gradient(generator))
            if step >= self._size.warm_up:
                names = (name for name, _ in self._policy.named_parameters())
                copies = (weight.to(torch.bfloat16, copy=True) for weight in kept)
                yield dict(zip(names, copies, strict=True))

    def _pretrain(self, masters: Sequence[Tensor]) -> None:
        """Next tokens."""
        size, generator = self._size, torch.Generator().manual_seed(0)
        optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-3, total_steps=size.lessons
        )

        def loss() -> Tensor:
            pieces = self._text.windows(size.pieces, generator)
            return -self._policy.answer_log_probs(pieces[:, :1], pieces[:, 1:]).mean()

        for _ in range(size.lessons):
            self._step(masters, optimizer, loss)
            schedule.step()

    def _policy_gradient(self, generator: torch.Generator) -> Tensor:
        """The loss of answers that the model gives now."""
        pieces = self._text.windows(_PROMPTS, generator).repeat_interleave(_ANSWERS_EACH, dim=0)
        prompts = pieces[:, : self._text.prompt_length]
        answers, log_probs = self._policy.sample(prompts, generator)
        advantages = group_advantages(self._text.rewards(prompts, answers), _ANSWERS_EACH)
        return grpo_loss(self._policy.answer_log_probs(prompts, answers), log_probs, advantages)

    def _step(
        self,
        kept: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[], Tensor],
    ) -> None:
        """Compute with the rounding of `kept`, and move them."""
        weights = list(self._policy.parameters())
        for weight, latest in zip(weights, kept, strict=True):
            weight.data.copy_(latest.bfloat16())
        self._policy.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        for weight, latest in zip(weights, kept, strict=True):
            assert weight.grad is not None
            latest.grad = weight.grad.to(latest.dtype)
        optimizer.step()
