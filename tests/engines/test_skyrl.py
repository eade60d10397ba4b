"""The recipe for SkyRL, which is not installed here: its client is a stand-in with its methods."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from tests.engines.environment import ROOT
from tests.engines.test_vllm_trainer import SHAPES, Fleet, engine_of
from tests.worlds.links import random_model

pytestmark = pytest.mark.timeout(120)


class SkyrlClient(Fleet):
    """Two servers behind SkyRL's own method names; it has no `paused`, `clear_cache`, `workers`."""

    is_paused = False

    def pause_generation(self, clear_cache: bool = False) -> None:
        self.calls.append("pause")
        self.is_paused = True

    def resume_generation(self) -> None:
        self.calls.append("resume")
        self.is_paused = False

    def reset_prefix_cache(self, reset_running_requests: bool = True) -> None:
        assert reset_running_requests
        self.calls.append("reset")

    def close(self) -> None:
        for worker in self.workers:
            worker.disconnect()


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    module = import_module("skyrl_trainer")
    module.register()
    module.register()  # SkyRL calls it for each engine
    yield module
    WeightTransferTrainerFactory._registry.pop(module.BACKEND)


def test_its_engine_pauses_writes_clears_and_resumes(recipe: Any) -> None:
    model, client = random_model(SHAPES, 0), SkyrlClient(engine_of(), engine_of())
    info = recipe.sender_init_info("127.0.0.1", 0, 2, "gloo")
    info.settings["timeout_s"] = 5.0
    made = WeightTransferTrainerFactory.trainer_init
    engine: Any = made(info, client=client, source=ModuleSource(model))
    for version in range(1, 4):
        client.calls.clear()
        engine.send_weights()
        assert client.hold(model)
        assert client.version == str(version)
        assert not client.is_paused
        model.get_parameter("a").data.view(-1)[version::17] *= 3
    written, named = ["start", "update", "finish"], ["start", "update", "finish"]
    assert client.calls == ["pause", *written, "reset", *named, "resume"]
    engine.shutdown()
    engine.client.close()  # as SkyRL's `teardown_engine` does
