"""The extension that runs inside SGLang's workers in the place of SGLang's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang.srt.checkpoint_engine.checkpoint_engine_worker import (
    SGLangCheckpointEngineWorkerExtensionImpl,
)
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from deltasync.errors import EngineFailed
from deltasync.integrations.checkpoint_engine import NOT_YET, ORDER
from deltasync.integrations.connection import Order
from deltasync.integrations.sglang import obey, worker_of


class Extension(SGLangCheckpointEngineWorkerExtensionImpl):
    """Obeys orders of a trainer, and loads checkpoints of a ParameterServer. Made for each update.

    A server is ready when an update succeeds, so one that brings no weights must not.
    """

    _failure: Exception | None = None

    def update_weights_from_ipc(self, zmq_handles: dict[str, str]) -> None:
        """Of a trainer, or a ParameterServer. What it raises is answered, and ends nothing."""
        if ORDER in zmq_handles:
            if not self.model_runner.is_draft_worker:  # which keeps its weights
                self._obey(Order.model_validate_json(zmq_handles[ORDER]))
            return
        worker_of(self.model_runner.model).reloaded()
        super().update_weights_from_ipc(zmq_handles)
        if self._failure is not None:
            raise EngineFailed(f"a bucket was not loaded: {self._failure}") from self._failure

    def get_model_loader(self) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
        """SGLang's, and notes a failure: a ParameterServer does not read the last bucket's."""
        load = super().get_model_loader()

        def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> None:
            try:
                load(weights)
            except Exception as error:
                self._failure = error
                raise

        return load_and_note

    def _obey(self, order: Order) -> None:
        obey(self.model_runner.model, order)
        if order.version is None and get_server_args().checkpoint_engine_wait_weights_before_ready:
            raise EngineFailed(NOT_YET)
