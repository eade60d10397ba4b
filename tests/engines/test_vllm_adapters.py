"""vLLM's models with layers that take LoRA adapters around their own follow, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from torch import Tensor

from deltasync.integrations.trainer_info import WithoutRoutes
from tests.engines import cold, toys
from tests.engines.environment import use_cpu
from tests.engines.judge import EQUAL, REFUSED, Versions
from tests.worlds.ranks import run_ranks

MODES: tuple[WithoutRoutes, ...] = get_args(WithoutRoutes)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def judge(_rank: int, folder: Path, architecture: str, targets: list[str] | None) -> None:
    """Experts have kernels of GPUs if adapters are enabled: they load on a CPU, and do not run."""
    with cold.alone():
        toys.write_toy(architecture, folder)
        _, specs = toys.specs_of(architecture, folder)
        settings: dict[str, Any] = {"enable_lora": True, "lora_target_modules": targets}
        versions = Versions(folder, specs, **settings)
        assert any(".base_layer." in name for name in versions.names)
        # Which adapter the last requests had: never filled here.
        versions.noise |= {path for path in versions.cold[-1] if ".punica_wrapper._" in path}
        verdict = versions.judge("refuse")
        assert verdict.outcome == EQUAL, verdict
        model, config = cold.cold(folder, **settings)
        second = cold.Engine(model, config)._engine._proof().cold.model
    memory = [one for module in second.modules() for one in adapters_of(module)]
    assert memory
    assert all(one.is_meta for one in memory)


def adapters_of(module: Any) -> Iterator[Tensor]:
    """What layers hold for as many adapters as there may be."""
    for name in ("lora_a_stacked", "lora_b_stacked"):
        held = vars(module).get(name, ())
        yield from [held] if isinstance(held, Tensor) else held


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [("LlamaForCausalLM", None), ("Qwen3MoeForCausalLM", ATTENTION)],
)
def test_weights_beneath_adapters_follow(
    architecture: str, targets: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=False)
    run_ranks(judge, 1, tmp_path, architecture, targets, timeout_s=280)


def judge_experts(_rank: int, folder: Path) -> None:
    with cold.alone():
        toys.write_toy("Qwen3MoeForCausalLM", folder)
        _, specs = toys.specs_of("Qwen3MoeForCausalLM", folder)
        versions = Versions(folder, specs, enable_lora=True)
        for mode in MODES:
            verdict = versions.judge(mode)
            assert verdict.outcome == REFUSED, verdict
            assert "takes LoRA adapters" in verdict.message, verdict
            assert "--lora-target-modules" in verdict.message, verdict


@pytest.mark.timeout(300)
def test_experts_beneath_adapters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's loader takes nothing of them: they would be stale."""
    use_cpu(monkeypatch, packs=False)
    run_ranks(judge_experts, 1, tmp_path, timeout_s=280)
