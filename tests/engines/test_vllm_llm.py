"""A whole vLLM within a program follows a trainer, whatever else it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.environment import use_cpu
from tests.engines.programs import TIMEOUT_S, Program

PLAIN = [("parallel",), ("sleeping",), ("brought",), ("speculative", "eagle", "refuse")]
PACKED = [("speculative", "of_its_own", "reload")]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Sleeping weights are not touched. Weights that were kept take the next delta.",
)
@pytest.mark.parametrize("command", [*PLAIN, *PACKED], ids=" ".join)
def test_an_engine_holds_what_a_cold_one_does(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM's workers are told to sleep, and keep their memory."""
    packs = command in PACKED
    if packs and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM packs no bf16 matrices on CPUs without AVX512: oneDNN refuses them")
    use_cpu(monkeypatch, packs=packs)
    follow(tmp_path, monkeypatch, *command)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM releases no memory of CPUs")
def test_an_engine_that_releases_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(tmp_path, monkeypatch, "sleeping")


def follow(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    with Program("-m", f"tests.engines.{program}", folder, *arguments) as running:
        running.wait()
