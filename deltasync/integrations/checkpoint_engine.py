"""SGLang's way of updating by checkpoint-engine: deltas beside a ParameterServer's checkpoints.

A server that has deltasync and checkpoint-engine installed beside it takes orders where it takes
the sockets of a ParameterServer: the entry point of this package replaces its worker's extension by
one that knows both. The trainer drives it by an `EngineSync` of a `SglangIpcServer`. Weights go
from the trainer to each worker directly; a ParameterServer goes on to bring whole checkpoints.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from deltasync.errors import EngineFailed
from deltasync.integrations.connection import Order
from deltasync.integrations.sglang import SglangServer

logger = logging.getLogger(__name__)

ORDER = "deltasync"
"""In the place of a device's uuid, of which ParameterServers send a socket."""

NOT_YET = "deltasync: done, and the weights that this server waits for come with the first version"

_EXTENSION = (
    "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
    ".SGLangCheckpointEngineWorkerExtensionImpl"
)


def register() -> None:
    """Let SGLang's workers take orders, if checkpoint-engine is installed. A plugin of SGLang's."""
    if find_spec("checkpoint_engine") is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        from deltasync.integrations.checkpoint_engine_worker import Extension
    except ImportError as error:  # a server that nobody updates so starts as without it
        logger.warning("deltasync takes no orders beside checkpoint-engine: %s", error)
        return
    HookRegistry.register(_EXTENSION, Extension, HookType.REPLACE)


class SglangIpcServer(SglangServer):
    """SGLang as a `Server` that is updated as a ParameterServer updates it.

    A server that was started with `--checkpoint-engine-wait-weights-before-ready` is ready once all
    its workers hold a version, and not before. Arguments as of `SglangServer`.
    """

    def update(self, version: int, /) -> None:
        self._give(Order(version=version), flush_cache=self._flush_cache)

    def name(self, version: int, /) -> None:
        """The workers hold it already: for the server too this is an update that succeeds."""
        self._give(Order(version=version), weight_version=str(version))

    def _check_started(self, info: dict[str, Any]) -> None:
        """It takes no setting; one without our extension misses its device in an order."""

    def _give(
        self, order: Order, *, flush_cache: bool = False, weight_version: str | None = None
    ) -> None:
        body = {
            "zmq_handles": {ORDER: order.model_dump_json()},
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        try:
            self._http.post("update_weights_from_ipc", body)
        except EngineFailed as error:
            if NOT_YET not in str(error):
                raise
