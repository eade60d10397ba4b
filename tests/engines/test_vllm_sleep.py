"""A whole vLLM that sleeps between two syncs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.environment import use_cpu
from tests.engines.programs import Program

pytestmark = pytest.mark.timeout(500)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Sleeping weights are not touched. Weights that were kept take the next delta.",
)
def test_the_calls_of_an_engine_that_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where vLLM's workers are told to sleep, and keep their memory."""
    use_cpu(monkeypatch, packs=False)
    sleep(tmp_path, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM releases no memory of CPUs")
def test_an_engine_that_releases_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(tmp_path, monkeypatch)


def sleep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the test's look inside
    with Program("-m", "tests.engines.sleeping", folder) as program:
        assert "slept well" in program.wait(timeout_s=480)
