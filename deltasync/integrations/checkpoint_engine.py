"""Deltas for SGLang next to the checkpoints of checkpoint-engine's ParameterServer.

If deltasync is installed next to a server, the server takes a trainer's requests where it takes a
ParameterServer's sockets: this package's entry point replaces the worker's extension by one that
takes both, or only requests if checkpoint-engine is not installed. The trainer uses an `EngineSync`
of a `SglangServer`, which also makes a server ready that waits for its initial weights. Weights
go directly from the trainer to each worker; a ParameterServer can still load whole checkpoints.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from types import ModuleType

from deltasync.integrations import sglang_scheduler
from deltasync.integrations.sglang import Extension

logger = logging.getLogger(__name__)

_MODULE = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
_CLASS = "SGLangCheckpointEngineWorkerExtensionImpl"
_EXTENSION = f"{_MODULE}.{_CLASS}"


def register() -> None:
    """Let SGLang's workers take requests. Each of SGLang's processes calls this as a plugin."""
    sglang_scheduler.register()
    if find_spec("checkpoint_engine") is None:
        _stand_in()
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        from deltasync.integrations.checkpoint_engine_worker import Extension as Both
    except ImportError as error:
        logger.warning(
            "deltasync takes requests, and no checkpoints of checkpoint-engine: %s", error
        )
        _stand_in()
        return
    HookRegistry.register(_EXTENSION, Both, HookType.REPLACE)


def _stand_in() -> None:
    """Replace the module of SGLang's extension, which cannot be imported without the package."""
    module = ModuleType(_MODULE)
    setattr(module, _CLASS, Extension)
    sys.modules[_MODULE] = module
