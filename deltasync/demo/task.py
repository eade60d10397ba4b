"""The task: sort a string of digits. Its reward is verified without a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True, slots=True)
class SortTask:
    """Sort `num_digits` digits into increasing order.

    Tokens 0 to 9 are the digits; token 10 ends the prompt. All prompts have the same length, and
    so have all answers: every batch is a rectangle.
    """

    num_digits: int = 12

    @property
    def vocabulary_size(self) -> int:
        return 11

    @property
    def prompt_length(self) -> int:
        return self.num_digits + 1

    @property
    def answer_length(self) -> int:
        return self.num_digits

    def sample_prompts(self, count: int, generator: Generator) -> Tensor:
        """Uniformly random prompts. int64[count, prompt_length]."""
        prompts = torch.full((count, self.prompt_length), 10)
        prompts[:, :-1] = torch.randint(10, (count, self.num_digits), generator=generator)
        return prompts

    def solutions(self, prompts: Tensor) -> Tensor:
        """The right answers. int64[count, answer_length]."""
        return prompts[:, :-1].sort(dim=1).values

    def rewards(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """1 for each answer that is right in every digit, else 0. float32[count]."""
        return (answers == self.solutions(prompts)).all(dim=1).float()
