"""Updates that vLLM's workers write in place, in verl's `CheckpointEngineManager`.

verl's own `update_weights` ends all requests, lets rollout workers load whole tensors, and resumes.
None of that is needed if the engines receive and stage while they generate. `register` wraps it:
verl's trainers for separate rollouts make the manager themselves, and read no
`checkpoint_manager_class`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

from deltasync.errors import ConfigError
from deltasync.integrations.verl_fleet import RolloutServer

BACKEND = "deltasync"


def register() -> None:
    """Let managers that are configured so update in place. May be called twice."""
    update = CheckpointEngineManager.update_weights
    if not hasattr(update, "is_in_place"):
        CheckpointEngineManager.update_weights = _in_place_if_asked(update)


def _in_place_if_asked(update: Callable[..., Any]) -> Callable[..., Any]:
    original = update.__wrapped__  # type: ignore[attr-defined]  # of auto_await: the coroutine function

    @auto_await  # type: ignore[untyped-decorator]
    @wraps(original)
    async def update_weights(manager: Any, global_steps: int | None = None) -> Mapping[str, float]:
        if not _is_asked(manager):
            return await original(manager, global_steps)  # type: ignore[no-any-return]
        return await _update(manager, global_steps)

    update_weights.is_in_place = True
    return update_weights  # type: ignore[no-any-return]


def _is_asked(manager: Any) -> bool:
    options = manager.config.engine_kwargs.get(manager.backend, {})
    return bool(manager.backend == BACKEND and options.get("in_place"))


async def _update(manager: Any, global_steps: int | None) -> Mapping[str, float]:
    """Raises ConfigError if a rollout has no server that could write in place."""
    trainers = manager.actor_wg
    servers = [_server_of(replica) for replica in manager.replicas]

    world = trainers.world_size
    await asyncio.gather(
        *trainers.execute_checkpoint_engine(["serve"] * world, servers=[servers] * world)
    )
    updates = trainers.update_weights(global_steps=global_steps, mode=manager.backend)
    metrics = await asyncio.gather(*updates)
    if global_steps is not None:
        heads = [replica.servers[0] for replica in manager.replicas]
        await asyncio.gather(*(head.set_global_steps.remote(global_steps) for head in heads))
    return {name: value for rank in metrics for name, value in (rank or {}).items()}


def _server_of(replica: Any) -> RolloutServer:
    """Raises ConfigError, with the replica's number."""
    name = f"replica {replica.replica_rank}"
    if replica.config.name != "vllm":
        raise ConfigError(f"{name} runs {replica.config.name}: in_place needs vLLM")
    if replica.config.disaggregation.enabled:
        raise ConfigError(f"{name} splits prefill and decode among servers: leave out in_place")
    url = f"http://{replica.server_address}"
    return RolloutServer(f"{name} at {url}", url, replica.world_size)
