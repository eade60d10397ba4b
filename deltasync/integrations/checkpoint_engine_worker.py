"""The extension that runs inside SGLang's workers in place of SGLang's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang.srt.checkpoint_engine.checkpoint_engine_worker import (
    SGLangCheckpointEngineWorkerExtensionImpl,
)
from torch import Tensor

from deltasync.errors import EngineFailed
from deltasync.integrations.sglang import REQUEST, handle_request, worker_of


class Extension(SGLangCheckpointEngineWorkerExtensionImpl):
    """Takes requests of a trainer, and checkpoints of a ParameterServer. Made for each update."""

    _failure: Exception | None = None

    def update_weights_from_ipc(self, zmq_handles: dict[str, str]) -> None:
        """Take a request or a checkpoint. SGLang answers with the error that this raises."""
        if REQUEST in zmq_handles:
            handle_request(self.model_runner, zmq_handles[REQUEST])
            return
        worker_of(self.model_runner.model).reloaded()
        super().update_weights_from_ipc(zmq_handles)
        if self._failure is not None:
            raise EngineFailed(f"a bucket was not loaded: {self._failure}") from self._failure

    def get_model_loader(self) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
        """Return SGLang's loader, which also notes a failure.

        A ParameterServer does not read the answer to its last bucket.
        """
        load = super().get_model_loader()

        def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> None:
            try:
                load(weights)
            except Exception as error:
                self._failure = error
                raise

        return load_and_note
