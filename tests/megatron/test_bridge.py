"""Megatron-Bridge with the recipe of docs/examples/megatron_bridge.py, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.environment import ROOT
from tests.engines.programs import Program
from tests.megatron.gathering import EXAMPLE, STEPS
from tests.worlds.ranks import free_port

pytestmark = pytest.mark.timeout(300)
MODES = ("truth", "stale", "recipe", "again")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    return tmp_path


def said_by_ranks(program: Path, folder: Path) -> str:
    ranks = ["--nproc-per-node", 2, "--master-port", free_port()]
    pretend = ["-m", "tests.megatron.pretend", program, folder]
    with Program("-m", "torch.distributed.run", *ranks, *pretend) as running:
        return running.wait()


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "With Megatron-core's distributed optimizer and `overlap_param_gather`, what the recipe "
    "exports after a step is what all ranks have updated. `make test-megatron`",
)
def test_what_is_exported_after_a_step_is_what_all_ranks_have_updated(folder: Path) -> None:
    said = said_by_ranks(ROOT / "tests" / "megatron" / "gathering.py", folder)
    found = re.findall(r"rank (\d) (\w+) (\d+) ([0-9a-f]{64})", said)
    exported = {(mode, int(step), int(rank)): sha256 for rank, mode, step, sha256 in found}
    assert len(exported) == len(MODES) * STEPS * 2, said
    truths = {exported["truth", step, rank] for step in range(STEPS) for rank in range(2)}
    assert len(truths) == STEPS  # both ranks export the same, and each step something else
    for step in range(STEPS):
        for rank in range(2):
            truth = exported["truth", step, rank]
            assert exported["recipe", step, rank] == truth
            assert exported["again", step, rank] == truth
            assert exported["stale", step, rank] != truth  # so that gathering is tested
        assert exported["stale", step, 0] != exported["stale", step, 1]


def test_a_model_elsewhere_follows_each_step(folder: Path) -> None:
    said = said_by_ranks(EXAMPLE, folder)
    versions = re.findall(r"^v(\d)(.*)", said, re.MULTILINE)
    assert [version for version, _ in versions] == ["1", "2", "3", "4", "5"], said
