"""The environment of vLLM's processes in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PLUGINS = ROOT / "tests" / "engines" / "plugin"


def use_cpu(monkeypatch: pytest.MonkeyPatch, *, packs: bool) -> None:
    """Let vLLM run on any CPU, and pack matrices, to where no route leads, or not."""
    plugins = ["deltasync", "without_tiles", *([] if packs else ["without_packing"])]
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{_PLUGINS}")
    monkeypatch.setenv("VLLM_PLUGINS", ",".join(plugins))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # no compiler, no warm-up
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
