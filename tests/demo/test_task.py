"""The task's prompts, solutions and reward."""

from __future__ import annotations

import torch

from deltasync.demo.task import SortTask

TASK = SortTask(num_digits=5)
PROMPTS = torch.tensor([[3, 1, 4, 1, 5, 10], [9, 8, 0, 8, 9, 10]])
SOLUTIONS = torch.tensor([[1, 1, 3, 4, 5], [0, 8, 8, 9, 9]])


def test_solutions_are_sorted() -> None:
    assert torch.equal(TASK.solutions(PROMPTS), SOLUTIONS)


def test_reward_is_for_the_whole_answer() -> None:
    answers = SOLUTIONS.clone()
    answers[1, 2] = 9  # increasing, but with digits that were not in the prompt
    assert TASK.rewards(PROMPTS, answers).tolist() == [1.0, 0.0]


def test_the_same_digits_in_another_order_earn_nothing() -> None:
    assert TASK.rewards(PROMPTS, PROMPTS[:, :-1]).tolist() == [0.0, 0.0]


def test_prompts_are_digits_and_an_end() -> None:
    prompts = TASK.sample_prompts(1000, torch.Generator().manual_seed(0))
    assert prompts.shape == (1000, TASK.prompt_length)
    assert set(prompts[:, :-1].flatten().tolist()) == set(range(10))
    assert set(prompts[:, -1].tolist()) == {10}


def test_prompts_follow_from_the_seed() -> None:
    first, again = (TASK.sample_prompts(8, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, again)
