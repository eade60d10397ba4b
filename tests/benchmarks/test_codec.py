"""Pairs of a real optimization, and codecs on them, at toy size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.codec.pairs import Pair, names, pairs
from benchmarks.codec.text import Text
from benchmarks.codec.training import SIZES, Training

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def made() -> dict[str, Pair]:
    return {pair.name: pair for pair in pairs("tiny")}


def test_pairs_are_all_that_were_planned(made: dict[str, Pair]) -> None:
    assert list(made) == names("tiny")
    assert "masters-1e-4-k1-int4" in made


def test_some_elements_change_and_most_do_not(made: dict[str, Pair]) -> None:
    pair = made["masters-1e-6-k1"]
    changed = [(pair.old[name] != new).sum() for name, new in pair.new.items()]
    numel = sum(new.numel() for new in pair.new.values())
    assert 0 < sum(changed) < 0.05 * numel


def test_the_same_pairs_come_again(made: dict[str, Pair]) -> None:
    (again,) = pairs("tiny", ["bf16-1e-4-k1"])
    first = made["bf16-1e-4-k1"]
    assert all(torch.equal(again.new[name], first.new[name]) for name in first.new)


def test_the_model_learns() -> None:
    losses = Training(SIZES["tiny"]).losses
    assert losses[-1] < losses[0]


def test_text_follows_its_own_rules() -> None:
    text = Text.of(64)
    pieces = text.windows(200, torch.Generator().manual_seed(0))
    prompts, answers = pieces[:, : text.prompt_length], pieces[:, text.prompt_length :]
    rewards = text.rewards(prompts, answers)
    assert 0.6 < rewards.mean() < 0.95
    assert torch.equal(text.successors, Text.of(64).successors)
