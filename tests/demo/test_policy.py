"""The policy samples what it says, GRPO weighs it as it should, and others are evaluated."""

from __future__ import annotations

import pytest
import torch

from deltasync.demo.grpo import grpo_loss
from deltasync.demo.policy import Policy, PolicySize
from deltasync.demo.task import SortTask
from deltasync.demo.trainer import EVALUATION_SEED

TASK = SortTask(num_digits=4)


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(TASK, PolicySize(width=32, num_heads=2, num_layers=2))


def prompts(count: int) -> torch.Tensor:
    return TASK.sample_prompts(count, torch.Generator().manual_seed(1))


def test_cached_sampling_agrees_with_the_whole_context(policy: Policy) -> None:
    answers, log_probs = policy.sample(prompts(16), torch.Generator().manual_seed(2))
    again = policy.answer_log_probs(prompts(16), answers)
    torch.testing.assert_close(log_probs, again, rtol=0, atol=1e-5)


def test_the_gradient_is_the_policy_gradient() -> None:
    behaviour = torch.tensor([[-1.0, -2.0], [-0.5, -0.25]])
    log_probs = behaviour.clone().requires_grad_()
    advantages = torch.tensor([2.0, -1.0])
    torch.autograd.backward(grpo_loss(log_probs, behaviour, advantages))
    expected = -advantages.unsqueeze(1).expand(2, 2) / 4
    torch.testing.assert_close(log_probs.grad, expected)


def test_evaluation_prompts_are_not_those_of_seed_0() -> None:
    # torch keeps 32 bits of a CPU seed: one beyond them would be a small one in disguise.
    mine, others = (
        TASK.sample_prompts(100, torch.Generator().manual_seed(seed))
        for seed in (EVALUATION_SEED, 0)
    )
    assert not torch.equal(mine, others)
