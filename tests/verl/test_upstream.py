"""What this integration relies on in the installed verl, and two changes that would end it."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path

from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineWorker
from verl.single_controller.ray import RayWorkerGroup


def source(module: str) -> str:
    """The text of a module of verl, which is not imported: it would want vLLM."""
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / f"{module}.py").read_text()


def test_vllm_loads_what_it_is_given_without_a_layerwise_reload() -> None:
    """verl#7987 would change it."""
    extension = source("workers/rollout/vllm_rollout/utils")
    assert "update_weights_from_ipc" in extension
    assert "layerwise" not in extension, (
        "verl#7987 has landed: verl's vLLM workers run weight syncs through a layerwise reload, "
        "which makes a layer anew from what has arrived. `hand_over: changed` then loses the "
        "tensors of a layer that did not change. Let `Rollout` hand everything over if rollouts "
        "are vLLM's (as `hand_over: all` does), say so in docs/integrations/verl.md, and change "
        "this test"
    )


def test_groups_and_trainers_are_not_replaced_within_a_run() -> None:
    """verl#7910 would change it."""
    new = {
        "re_rendezvous": CheckpointEngine,
        "recover_weights_from_rollout": CheckpointEngineManager,
        "replace_worker": RayWorkerGroup,
    }
    whole = source("checkpoint_engine/base") + source("workers/engine_workers")
    landed = [name for name, owner in new.items() if hasattr(owner, name) or name in whole]
    assert not landed, (
        f"verl#7910 has landed (verl has {', '.join(landed)}): verl replaces dead actors in a run "
        "and restores trainers from rollouts. Answer its calls in `DeltaSyncEngine`: a replaced "
        "trainer is a new `Trainer`, whose first sync is full, and `recover_weights_from_rollout` "
        "has to be refused by name unless it reads `Rollout`'s copy; test both, and change this "
        "test"
    )


def test_updates_are_made_as_the_in_place_path_replaces_them() -> None:
    """`verl_manager` wraps one coroutine, and asks trainers and servers what it asks them."""
    update = CheckpointEngineManager.update_weights
    own = getattr(update, "__wrapped__", None)
    advice = "read verl's update_weights again, and let deltasync/integrations/verl_manager.py do \
what it now does besides pausing"
    assert inspect.iscoroutinefunction(own), advice
    steps = ("execute_checkpoint_engine", "update_weights", "finalize", "resume_generation")
    base = source("checkpoint_engine/base")
    assert all(step in base for step in steps), advice
    assert "set_global_steps" in source("workers/rollout/vllm_rollout/vllm_async_server"), advice
    assert inspect.iscoroutinefunction(CheckpointEngineWorker.update_weights), advice
