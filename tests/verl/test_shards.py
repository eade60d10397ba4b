"""Which training engines of verl can send shards, and under which names."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from deltasync.errors import ConfigError
from deltasync.integrations.verl import shards_of


class Sharded(FSDPModule, nn.Module):
    """What FSDP2 makes of a module, as far as its type goes."""

    def __new__(cls) -> Sharded:
        return nn.Module.__new__(cls)


def engine_of(module: object) -> Any:
    engine = FSDPEngine.__new__(FSDPEngine)
    engine.module, engine._qat_enabled = module, False
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"))
    return engine


def adapted(engine: Any) -> None:
    engine.module.peft_config = {}


def quantised(engine: Any) -> None:
    engine._qat_enabled = True


def unsharded(engine: Any) -> None:
    engine.module = nn.Linear(2, 2)


def pipelined(engine: Any) -> None:
    engine.module = [nn.Linear(2, 2)]


@pytest.mark.parametrize("make", [adapted, quantised, unsharded, pipelined])
def test_what_verl_does_more_with_than_gather_is_refused(make: Callable[[Any], None]) -> None:
    engine = engine_of(Sharded())
    shards_of(engine)
    make(engine)
    with pytest.raises(ConfigError, match="use the backend `deltasync`"):
        shards_of(engine)


def test_another_engine_is_refused_by_name() -> None:
    class MegatronEngine:
        def get_per_tensor_param(self) -> None: ...

    with pytest.raises(ConfigError, match="shards of a MegatronEngine"):
        shards_of(MegatronEngine())
