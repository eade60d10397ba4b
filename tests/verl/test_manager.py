"""verl's own manager, registry and workers over Ray, configured as the documentation says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import ray
import torch
import yaml
from torch import Tensor
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.test_docs import blocks
from tests.verl import actors
from tests.verl.rollouts import hook

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    environment = {"worker_process_setup_hook": hook()}
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


class Replica:
    """An inference server of one worker, of which verl's manager asks nothing that a CPU cannot."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        rollout = RolloutConfig(name="vllm", checkpoint_engine=config)
        self.group = group_of(actors.RolloutWorker, 1, rollout)
        self.workers = self.group.workers

    async def nothing(self, **kwargs: bool) -> None:
        """Generation is not what is tested."""

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing

    def state(self) -> tuple[dict[str, Tensor], int | None]:
        (found,) = self.group.state()
        return found  # type: ignore[no-any-return]


def group_of(worker: type, world: int, config: object) -> Any:
    pool = RayResourcePool([world], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(worker), config=config)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def documented(backend: str) -> CheckpointEngineConfig:
    """What the documentation tells users to configure."""
    shown = [b for b in blocks() if b.path.endswith("/verl.md") and b.language == "yaml"]
    found = [
        yaml.safe_load(b.code)["actor_rollout_ref"]["rollout"]["checkpoint_engine"] for b in shown
    ]
    config = next(one for one in found if one["backend"] == backend)  # the first is the usual one
    return CheckpointEngineConfig(**config)


def update(manager: CheckpointEngineManager, step: int) -> Mapping[str, float]:
    return manager.update_weights(step)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("backend", "rollouts"), [("deltasync", 2), ("delta_sharded", 1)])
def test_rollouts_follow_an_fsdp2_trainer(backend: str, rollouts: int) -> None:
    config = documented(backend)
    trainers = group_of(actors.TrainerWorker, 2, config)  # both take part in gathering
    replicas = [Replica(config) for _ in range(rollouts)]
    manager = CheckpointEngineManager(config, trainers, replicas[:1])

    first = update(manager, 10)
    assert first["checkpoint_engine/changed_ratio"] == 1.0
    check(trainers, replicas[:1], step=10)

    trainers.step(50)
    metrics = update(manager, 11)
    assert 0 < metrics["checkpoint_engine/changed_ratio"] < 0.05
    ratio = metrics["checkpoint_engine/payload_mbytes"] / first["checkpoint_engine/payload_mbytes"]
    assert ratio < 0.5
    check(trainers, replicas[:1], step=11)

    manager.add_replicas(replicas[1:])
    replicas[0].group.fail_once()
    trainers.step(1000)
    with pytest.raises(RuntimeError, match="planted"):
        update(manager, 12)
    assert update(manager, 13)["checkpoint_engine/changed_elems"] == 0
    check(trainers, replicas, step=13)

    manager.remove_replicas(replicas[1:])
    assert update(manager, 14)["checkpoint_engine/payload_mbytes"] == 0
    check(trainers, replicas[:1], step=14)
    for one in [*trainers.workers, *(worker for r in replicas for worker in r.workers)]:
        ray.kill(one)


def check(trainers: Any, replicas: list[Replica], *, step: int) -> None:
    """Rollouts hold what the trainer has."""
    wanted = trainers.weights()[0]
    for replica in replicas:
        weights, steps = replica.state()
        assert steps == step
        assert weights.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(weights[name].view(torch.int16), tensor.view(torch.int16)), name
