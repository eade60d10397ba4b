"""Updates in one call, by vLLM's engine core: it pauses, writes, names and resumes by itself.

An engine core runs steps and handles calls in one thread, so that nothing is scheduled during a
call. `register` wraps its `collective_rpc`, which each of vLLM's clients can reach. This module
imports vLLM only within functions, because the trainer's end uses its names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch

from deltasync.errors import DeltaSyncError, EngineFailed, EngineTaken
from deltasync.integrations.calls import asked
from deltasync.integrations.trainer_info import Work

logger = logging.getLogger(__name__)

BACKEND = "deltasync"
REACH, UPDATE, CLEAR = "deltasync_reach", "deltasync_update", "deltasync_clear"  # of a core
WRITE, TRY = "deltasync_write", "deltasync_try"  # of its workers
_FINISH = "finish_weight_update"
_CALLS = (  # of workers, in an update that takes several
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    _FINISH,
)

_NOT_CLEARED = (
    "vLLM has not dropped its cached prefixes, which are of old weights: a connector for keys and "
    "values still holds some; the next update tries again"
)


_STOPPED = WeakSet[Any]()  # cores that are paused since an update here failed


def register() -> None:
    """Let engine cores that are created in this process take our calls. May be called twice."""
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore.collective_rpc, "takes_updates"):
        EngineCore.collective_rpc = _taking_updates(EngineCore.collective_rpc)


def _taking_updates(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collective_rpc)
    def call(
        core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method == REACH:
            return [reach(core)]
        if method == UPDATE:
            return [_error_of(update, core, *args)]
        if method == CLEAR:
            _clear(core)
            return [None]
        if method in _CALLS and _is_ours(core):
            name, args = (args, ()) if method == _FINISH else ((), args)
            errors = collective_rpc(core, TRY, timeout, (method, args, kwargs or {}))
            _check(errors)
            if name:  # as vLLM's own `finish_weight_update`, which workers take without one
                core.set_weight_version(*name)
            return [None for _ in errors]
        return collective_rpc(core, method, timeout, args, kwargs)

    call.takes_updates = True  # type: ignore[attr-defined]
    return call


def _error_of(call: Callable[..., object], *arguments: object) -> str:
    """Call, and return why it failed, or an empty string: vLLM would lose the text of an exception.

    When a worker raises, vLLM also leaves the answers of the workers after it unread, and takes
    them for those of its next calls.
    """
    try:
        asked(call, *arguments)
    except DeltaSyncError as error:
        logger.exception("a call of deltasync failed")
        kind = "" if isinstance(error, EngineFailed) else f"{type(error).__name__}: "
        return f"{kind}{error}" or type(error).__name__
    return ""


def reach(core: Any) -> int:
    """Return the number of workers that `update` of this core writes; 0 if it must not be used.

    The replicas of a data-parallel mixture of experts exchange tokens within a step, and each has a
    core of its own that pauses by itself: one would compute with the experts of another's version.
    A core in the process of its client has no loop that could finish the steps in flight.
    """
    parallel = core.vllm_config.parallel_config
    has_loop = hasattr(core, "_process_engine_step")
    if not (_is_ours(core) and has_loop) or parallel.data_parallel_size > 1:
        return 0
    return int(parallel.world_size)


def _is_ours(core: Any) -> bool:
    config = core.vllm_config.weight_transfer_config
    return config is not None and config.backend == BACKEND


def update(
    core: Any, version: int, work: Work, clears: bool, stays_paused: bool, holder: str
) -> None:
    """Bring all workers of a core to a version, and name it.

    Steps in flight end first, with the old weights. Nothing is scheduled until all workers hold the
    version. If anything fails, the core stays paused if `stays_paused`; the next update that
    succeeds resumes it. A core that was paused before, or sleeps, is not resumed.

    Args:
        core: vLLM's EngineCoreProc.
        version: The version.
        work: What to do; "pass" and "name" pause only to clear caches.
        clears: Whether keys, values and encodings are dropped, because older weights computed them.
        stays_paused: Whether a failure leaves generation paused; not if it is another trainer's.
        holder: Who asks.

    Raises EngineFailed if a worker failed, and whatever the engine raises.
    """
    before = core.scheduler.pause_state
    if not _is_paused(core):
        _STOPPED.discard(core)
    is_stopped = core in _STOPPED
    try:
        if work == "write" or clears:
            _pause(core)
            _end_steps(core)
        _check(core.model_executor.collective_rpc(WRITE, args=(version, work, holder)))
        if clears:
            _clear(core)
        core.set_weight_version(str(version))
    except Exception as error:
        if stays_paused and EngineTaken.__name__ not in str(error):
            if is_stopped or before.name == "UNPAUSED":
                _STOPPED.add(core)
            _pause(core)
        else:
            core.scheduler.set_pause_state(before)
        raise
    _STOPPED.discard(core)
    if is_stopped:
        core.wake_up(["scheduling"])  # resumes, unless a part of the engine sleeps
    elif core.scheduler.pause_state != before:
        core.scheduler.set_pause_state(before)


def _check(errors: Sequence[str]) -> None:
    """Raise EngineFailed with what the workers that failed say, if some did."""
    if failed := [text for text in errors if text]:
        raise EngineFailed("; ".join(dict.fromkeys(failed)))


def write(worker: Any, version: int, work: Work, holder: str) -> str:
    """A worker's part of `update`, in place of three calls of vLLM's.

    Args:
        worker: vLLM's worker.
        version, work, holder: As of `Worker.commit`.

    Returns:
        An empty string, or why it failed.
    """
    return _error_of(_write, worker, version, work, holder)


def _write(worker: Any, version: int, work: Work, holder: str) -> None:
    if work == "write" and torch.accelerator.is_available():
        torch.accelerator.synchronize()  # steps may end before all that they launched
    try:
        worker.start_weight_update()
        worker.update_weights({"version": version, "holder": holder, "work": work})
        worker.finish_weight_update()
    except BaseException:
        with suppress(DeltaSyncError, RuntimeError):  # vLLM may have ended the update itself
            worker.finish_weight_update()
        raise


def attempt(worker: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A worker's part of another call. Returns an empty string, or why it failed."""
    return _error_of(partial(getattr(worker, method), *args, **kwargs))


def _pause(core: Any) -> None:
    if not _is_paused(core):
        from vllm.v1.core.sched.interface import PauseState

        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def _is_paused(core: Any) -> bool:
    """Whether nothing at all is scheduled, as in a pause with mode="keep"."""
    return bool(core.scheduler.pause_state.name == "PAUSED_ALL")


def _end_steps(core: Any) -> None:
    """Finish the steps in flight, of asynchronous scheduling and of pipeline stages.

    Steps that begin meanwhile compute nothing: they only serve a connector for keys and values,
    which may wait for another engine for long.
    """
    newest = next(iter(core.batch_queue or ()), None)
    try:
        while newest is not None and any(batch is newest for batch in core.batch_queue):
            core._process_engine_step()
    except BaseException:  # as if it had failed in the core's own loop, which ends the engine
        from vllm.v1.engine import EngineCoreRequestType

        core.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
        raise


def _clear(core: Any) -> None:
    """Let no request find what older weights computed. Raises EngineFailed.

    Requests that run are recomputed: their keys and values are of old weights.
    """
    if not core.reset_prefix_cache(True, True):
        raise EngineFailed(_NOT_CLEARED)
    model = core.vllm_config.model_config
    if model.is_multimodal_model or model.is_encoder_decoder or model.runner_type != "generate":
        core.reset_encoder_cache()  # a call to the workers, for which others need not wait
