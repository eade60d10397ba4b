"""verl's manager, its FSDP2 trainer and vLLM as verl starts it, which is written in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from ray.exceptions import RayError
from verl.checkpoint_engine import CheckpointEngineManager

from tests.verl import rollouts

pytestmark = pytest.mark.timeout(900)  # two servers start within one of these


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rollouts.save_model(folder)
    return folder


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[Any]]:
    """One of two ranks whose workers can, and one whose worker cannot write in place."""
    config = rollouts.configured()
    with rollouts.cluster(3):
        able = rollouts.replica_of(0, folder, config, tensor_parallel=2)
        unable = rollouts.replica_of(1, folder, config, backend=None)
        rollouts.start(able, unable)
        yield [able, unable]


@pytest.mark.promise(
    "All or nothing",
    "Under verl, vLLM's tensor-parallel workers hold the trainer's bits after an update in "
    "place, and an engine that cannot take part ends the update with an error that names it.",
)
def test_both_ranks_write_what_changed_and_requests_go_on(
    folder: Path, replicas: list[Any]
) -> None:
    """When a replica is added that cannot, no engine is written."""
    able, unable = replicas
    config = rollouts.configured()
    trainers = rollouts.trainer_of(folder, config)
    manager = CheckpointEngineManager(config, trainers, [able])
    before, _ = rollouts.tokens(able, "before")
    for step in (1, 2, 3):
        trainers.step(5)
        metrics = manager.update_weights(step)
        assert metrics["checkpoint_engine/version"] > 0
        if step > 1:
            assert 0.1 < metrics["checkpoint_engine/changed_ratio"] < 0.3
        rollouts.assert_holds(able, held := trainers.weights()[0])
        after, label = rollouts.tokens(able, f"after {step}")
        assert label == step
        assert after != before

    manager.add_replicas([unable])
    trainers.step(5)
    with pytest.raises(RayError, match=f"replica 1 at http://{unable.server_address}"):
        manager.update_weights(4)
    rollouts.assert_holds(able, held)
    manager.remove_replicas([unable])
    manager.update_weights(5)
    rollouts.assert_holds(able, trainers.weights()[0])
    assert rollouts.tokens(able, "last")[1] == 5
