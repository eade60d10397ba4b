"""vLLM's own tests of an LLM's weight transfer calls, of an engine that has a trainer.

`tests/entrypoints/rl/weight_transfer/test_offline.py`: connecting, an update and the whole flow
apply; not the two tests that start NCCL's backend to look at the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import LLM

from tests.engines.checkpoints import write_config, write_model
from tests.engines.environment import use_cpu
from tests.engines.plugin.cpu_only import without_packing, without_tiles
from tests.engines.vllm_own import own


@pytest.fixture(autouse=True)
def trained_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_config("LlamaForCausalLM", tmp_path)
    write_model(folder)
    use_cpu(monkeypatch, packs=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # vLLM's tests leave both set
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    without_tiles()
    without_packing()
    monkeypatch.setattr(own.OFFLINE, "MODEL_NAME", str(folder))
    monkeypatch.setattr(own.OFFLINE, "mock_create_engine", own.Trained)
    one_device = SimpleNamespace(device_count=lambda: 1)
    monkeypatch.setattr(own.OFFLINE, "torch", SimpleNamespace(accelerator=one_device))


@pytest.fixture
def vllm_runner() -> Callable[..., AbstractContextManager[Any]]:
    return started


@contextmanager
def started(model: str, *, load_format: str, **settings: Any) -> Iterator[Any]:
    """An LLM with its weights, of which `load_format` wants none."""
    assert load_format == "dummy"
    llm = LLM(model, dtype="bfloat16", max_model_len=64, **settings)
    [engine] = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
    with closing(engine.sync):
        yield SimpleNamespace(llm=llm)


globals().update(
    own.tests(
        own.OFFLINE,
        "test_init_weight_transfer_engine_calls_engine",
        "test_update_weights_calls_engine",
        "test_full_weight_transfer_flow",
    )
)
