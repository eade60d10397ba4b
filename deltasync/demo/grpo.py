"""GRPO: advantages within groups of answers to one prompt, and the clipped policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

CLIP_RATIO = 0.2


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """How much better each answer is than its group, in standard deviations.

    Args:
        rewards: float32[B], the answers to one prompt adjacent.
        group_size: Answers to one prompt; divides B.

    Returns:
        float32[B]; 0 in groups whose rewards are all equal, which teach nothing.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def grpo_loss(log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Token-level clipped policy gradient, without a KL term.

    Args:
        log_probs: float32[B, T] of the sampled tokens under the policy in training.
        behaviour_log_probs: float32[B, T] under the bf16 policy that sampled them.
        advantages: float32[B].

    Returns:
        A scalar. On-policy, the ratio differs from 1 by rounding alone.
    """
    ratio = (log_probs - behaviour_log_probs).exp()
    clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
    gain = advantages.unsqueeze(1)
    return -torch.minimum(ratio * gain, clipped * gain).mean()
