"""Hooks around calls of SGLang's scheduler: clear caches, and do not touch sleeping weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from deltasync.integrations.sglang import REQUEST, worker_of
from deltasync.integrations.worker import Worker

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WEIGHTS = "weights"
_NOT_CLEARED = (
    "SGLang has not dropped its cached prefixes, which are of old weights: grammars are being "
    "compiled, keys and values transferred, or requests run in pipeline stages; the next update "
    "tries again"
)


def register() -> None:
    """Register the functions below as hooks, in each of SGLang's processes that schedules.

    Raises ImportError or AttributeError if SGLang lacks a method that is hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = resolve_name(_MANAGER)
    for name, around in _AROUND.items():
        getattr(manager, name)
        HookRegistry.register(f"{_MANAGER}.{name}", around, HookType.AROUND)


def _update(update: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Clear caches for a request that asks for it. While requests run, SGLang itself refuses to,
    and 0.5.20 exits.
    """
    if REQUEST not in request.zmq_handles or not request.flush_cache:
        return update(manager, request)
    request.flush_cache = False
    with _retracted(manager.scheduler):
        done = update(manager, request)
        if done.success and not _clear(manager):
            done.success, done.message = False, _NOT_CLEARED
    return done


@contextmanager
def _retracted(scheduler: Any) -> Iterator[None]:
    """Take keys and values from running requests. SGLang recomputes them afterwards. With pipeline
    stages SGLang cannot do this, and nothing is done.
    """
    from sglang.srt.distributed.parallel_state import get_pipeline_model_parallel_world_size
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    if get_pipeline_model_parallel_world_size() > 1:
        yield
        return
    is_paused = scheduler._engine_paused
    try:
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        yield
    finally:
        if not is_paused:
            scheduler.continue_generation(ContinueGenerationReqInput())


def _clear(manager: Any) -> bool:
    """Drop cached keys, values and encodings. Returns False if SGLang cannot drop them now."""
    from sglang.srt.managers import mm_schedule

    waiting = manager.scheduler.waiting_queue
    if any(request.kv.holds_kv for request in waiting):
        return False
    manager.scheduler.waiting_queue = []  # these hold no keys; 0.5.20 does not check that
    try:
        is_cleared = bool(manager.flush_cache(empty_cache=False))
    finally:
        manager.scheduler.waiting_queue = waiting
    if is_cleared and mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
    return is_cleared


def _release(release: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Prepare for the release of weights. If SGLang does not keep them, the worker disconnects."""
    from sglang.srt.runtime_context import get_server_args

    if not _is_of_weights(request):
        return release(manager, request)
    is_released = manager.memory_saver_adapter.enabled
    is_lost = is_released and not get_server_args().enable_weights_cpu_backup
    with _worker(manager).released(manager.tp_worker.model_runner.model if is_lost else None):
        return release(manager, request)


def _resume(resume: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Use the weights again, which are back where they were."""
    done = resume(manager, request)
    if _is_of_weights(request):
        _worker(manager).wake()
    return done


_AROUND: dict[str, Callable[..., Any]] = {
    "update_weights_from_ipc": _update,
    "release_memory_occupation": _release,
    "resume_memory_occupation": _resume,
}


def _is_of_weights(request: Any) -> bool:
    return not request.tags or _WEIGHTS in request.tags


def _worker(manager: Any) -> Worker:
    return worker_of(manager.tp_worker.model_runner.model)
