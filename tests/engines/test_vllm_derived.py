"""What vLLM's models compute from their weights follows every sync, or the trainer is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

from deltasync.errors import ConfigError
from deltasync.integrations.trainer_info import WithoutRoutes
from tests.engines import cold, toys
from tests.engines.environment import use_cpu
from tests.engines.judge import EQUAL, REFUSED, Versions
from tests.engines.reached import seen
from tests.worlds.ranks import run_ranks

Found = Callable[[str, str, str, str], None]
MODES: tuple[WithoutRoutes, ...] = get_args(WithoutRoutes)
# Their loaders write to parameters, or compute what is none, by themselves.
ARCHITECTURES = [
    "GptOssForCausalLM",
    "Step3TextForCausalLM",
    "MiMoV2FlashForCausalLM",
    "PanguEmbeddedForCausalLM",  # with sinks
    "PanguProMoEV2ForCausalLM",  # with sinks
]


def judge(_rank: int, architecture: str, folder: Path) -> None:
    """Both answers to weights without routes, in one process, which takes long to import vLLM."""
    with cold.alone():
        toys.write_toy(architecture, folder)
        _, specs = toys.specs_of(architecture, folder)
        versions = Versions(folder, specs)
        verdicts = {mode: versions.judge(mode) for mode in MODES}
    wrong = {m: v for m, v in verdicts.items() if v.outcome not in (EQUAL, REFUSED)}
    assert wrong == {}, wrong
    outcomes = {mode: verdict.outcome for mode, verdict in verdicts.items()}
    (folder / "outcomes.json").write_text(json.dumps(outcomes), encoding="utf-8")


@pytest.mark.promise(
    "Bits",
    "What an engine computes from its weights is updated in each sync, or `connect` refuses.",
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_computed_from_weights_follows(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Found
) -> None:
    use_cpu(monkeypatch, packs=False)
    run_ranks(judge, 1, architecture, tmp_path, timeout_s=280)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text(encoding="utf-8"))
    routed = outcomes["refuse"] == EQUAL
    found("vLLM", architecture, "1", "routed" if routed else outcomes["reload"])


def use_flashinfer_sinks() -> None:
    """FlashInfer's own step after loading, in the place of the CPU's, which has none."""

    class Absent(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(f"{self.__name__}.{name}")

        def __or__(self, _: Any) -> Any:
            return object

        __ror__ = __or__

        def __call__(self, *_: Any, **__: Any) -> Any:
            return lambda function: function

    for name in ("", ".comm", ".decode", ".prefill", ".cascade", ".utils", ".fused_moe"):
        sys.modules.setdefault(f"flashinfer{name}", Absent(f"flashinfer{name}"))
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Ours
    from vllm.v1.attention.backends.flashinfer import FlashInferImpl as Theirs

    def process(self: Any, act_dtype: torch.dtype) -> None:
        if not hasattr(self, "_sinks_source"):
            self._sinks_source = self.sinks
        Theirs.process_weights_after_loading(self, act_dtype)

    Ours.process_weights_after_loading = process


def judge_with_flashinfer(_rank: int, folder: Path) -> None:
    with cold.alone():
        toys.write_toy("GptOssForCausalLM", folder)
        use_flashinfer_sinks()
        _, specs = toys.specs_of("GptOssForCausalLM", folder)
        versions = Versions(folder, specs)
        path = ".model.layers.0.attn.attn.impl.sinks"
        assert versions.cold[0][path].dtype == torch.float32
        assert path in versions.follows()
        verdicts = {mode: versions.judge(mode) for mode in MODES}
        wrong = {m: v for m, v in verdicts.items() if v.outcome not in (EQUAL, REFUSED)}
        assert wrong == {}, wrong


@pytest.mark.timeout(300)
def test_sinks_that_flashinfer_converts_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=False)
    run_ranks(judge_with_flashinfer, 1, tmp_path, timeout_s=280)


def leave_out_the_head(_rank: int, folder: Path) -> None:
    """The engine has a head of its own, the trainer ties it."""
    with cold.alone():
        toys.write_toy("LlamaForCausalLM", folder)
        _, specs = toys.specs_of("LlamaForCausalLM", folder)
        first, second = (toys.random_weights(specs, seed) for seed in (0, 1))
        model, config = cold.cold(folder, first)
        before = seen(model)
        del second["lm_head.weight"]
        for mode in MODES:
            _, sync = cold.synced(second, model, config, folder, mode)
            with sync:
                with pytest.raises(ConfigError, match=r"lm_head\.weight"):
                    sync.connect()
                now = seen(model)
                assert all(one.has_bits_of(now[path]) for path, one in before.items())


@pytest.mark.timeout(300)
def test_an_engine_that_has_more_than_the_trainer_sends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpu(monkeypatch, packs=False)
    run_ranks(leave_out_the_head, 1, tmp_path, timeout_s=280)
