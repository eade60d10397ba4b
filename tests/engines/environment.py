"""The environment of engines' processes in tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_HERE = ROOT / "tests" / "engines"


def use_cpu(monkeypatch: pytest.MonkeyPatch, *, packs: bool) -> None:
    """Let vLLM run on any CPU, and pack matrices, to where no route leads, or not."""
    plugins = ["deltasync", "without_tiles", *([] if packs else ["without_packing"])]
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{_HERE / 'plugin'}")
    monkeypatch.syspath_prepend(str(_HERE / "plugin"))  # spawned children take over this path
    monkeypatch.setenv("VLLM_PLUGINS", ",".join(plugins))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # no compiler, no warm-up
    # Or each rank has a NUMA node, and all servers the same core, where one can starve others.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def use_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang run on a CPU, without the packages that want CUDA."""
    path = [str(ROOT), str(_HERE / "stubs"), str(_HERE / "plugin")]
    monkeypatch.setenv("PYTHONPATH", ":".join(path))
    monkeypatch.setattr(sys, "path", [*path, *sys.path])  # spawned children take over this one
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
