"""SGLang's way of updating by checkpoint-engine: deltas beside a ParameterServer's checkpoints.

A server that has deltasync installed beside it takes orders where it takes the sockets of a
ParameterServer: the entry point of this package replaces its worker's extension by one that knows
both, or orders alone where checkpoint-engine is not there. The trainer drives it by an `EngineSync`
of a `SglangServer`, or of a `SglangIpcServer` if it waits for its initial weights. Weights go from
the trainer to each worker directly; a ParameterServer goes on to bring whole checkpoints.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from types import ModuleType

from deltasync.integrations import sglang_scheduler
from deltasync.integrations.sglang import NOT_YET, ORDER, Extension, SglangServer

__all__ = ["NOT_YET", "ORDER", "SglangIpcServer", "register"]

logger = logging.getLogger(__name__)

_MODULE = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
_CLASS = "SGLangCheckpointEngineWorkerExtensionImpl"
_EXTENSION = f"{_MODULE}.{_CLASS}"


def register() -> None:
    """Let SGLang's workers take orders. A plugin of SGLang's, which each of its processes calls."""
    sglang_scheduler.register()
    if find_spec("checkpoint_engine") is None:
        _stand_in()
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        from deltasync.integrations.checkpoint_engine_worker import Extension as Both
    except ImportError as error:
        logger.warning("deltasync takes orders, and no checkpoints of checkpoint-engine: %s", error)
        _stand_in()
        return
    HookRegistry.register(_EXTENSION, Both, HookType.REPLACE)


def _stand_in() -> None:
    """Be found where SGLang imports its extension, which itself cannot be imported."""
    module = ModuleType(_MODULE)
    setattr(module, _CLASS, Extension)
    sys.modules[_MODULE] = module


class SglangIpcServer(SglangServer):
    """SGLang as a `Server` that names a version as a ParameterServer does, by an update.

    A server that was started with `--checkpoint-engine-wait-weights-before-ready` is ready once all
    its workers hold a version, and not before. Arguments as of `SglangServer`.
    """

    def name(self, version: int, /) -> None:
        """The workers hold it already: for the server too this is an update that succeeds."""
        self._write(version, weight_version=str(version))
