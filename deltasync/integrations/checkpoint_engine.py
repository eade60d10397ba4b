"""Requests of a trainer to SGLang's workers, beside checkpoints of checkpoint-engine.

If deltasync is installed next to a server, the server takes a trainer's requests where it takes a
ParameterServer's sockets. The trainer uses an `EngineSync` of a `SglangServer`. Weights go directly
from the trainer to each worker; a ParameterServer can still load whole checkpoints.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from deltasync.errors import EngineFailed
from deltasync.integrations import sglang_scheduler
from deltasync.integrations.sglang import REQUEST, Extension, handle_request, worker_of

logger = logging.getLogger(__name__)

_MODULE = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
_CLASS = "SGLangCheckpointEngineWorkerExtensionImpl"


def register() -> None:
    """Let SGLang's workers take requests. Each of SGLang's processes calls this as a plugin."""
    sglang_scheduler.register()
    try:
        import_module(_MODULE)
    except ImportError as error:
        logger.info("deltasync takes requests, and no checkpoints of checkpoint-engine: %s", error)
        module = ModuleType(_MODULE)  # in the place of SGLang's, which needs checkpoint-engine
        setattr(module, _CLASS, Extension)
        sys.modules[_MODULE] = module
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    method = f"{_MODULE}.{_CLASS}.update_weights_from_ipc"
    HookRegistry.register(method, _update, HookType.AROUND)


def _update(update: Callable[..., Any], extension: Any, zmq_handles: Mapping[str, str]) -> None:
    """Take a request, or a checkpoint, of which trainers learn in their next sync.

    Raises EngineFailed if a bucket was not loaded: a ParameterServer does not read the answer to
    its last one.
    """
    if REQUEST in zmq_handles:
        handle_request(extension.model_runner, zmq_handles[REQUEST])
        return
    worker_of(extension.model_runner.model).reloaded()
    load, failures = extension.get_model_loader(), list[Exception]()

    def load_and_note(weights: object) -> None:
        try:
            load(weights)
        except Exception as error:
            failures.append(error)
            raise

    extension.get_model_loader = lambda: load_and_note
    update(extension, zmq_handles)
    if failures:
        raise EngineFailed(f"a bucket was not loaded: {failures[0]}") from failures[0]
