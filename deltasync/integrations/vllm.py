"""vLLM's end of its weight transfer interface, and the trainer's, which does not import vLLM.

An engine needs no more than `weight_transfer_config={"backend": "deltasync"}`: the entry point of
this package registers the backend in each of vLLM's processes. The trainer drives it by any client
of vLLM's four calls.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol

from deltasync.delta.bits import dtype_of
from deltasync.errors import ConfigError, TransportTimeout
from deltasync.sync.options import SenderOptions
from deltasync.sync.round import Moment
from deltasync.sync.sender import WeightSender
from deltasync.sync.source import WeightSource
from deltasync.sync.stats import SyncStats
from deltasync.transports import collective, cuda_ipc, shared_memory
from deltasync.transports.base import SendTransport

BACKEND = "deltasync"
# What staging takes at most for each byte that travels: dense bytes of which a rank holds parts.
_STAGED_PER_BYTE = 10


def register() -> None:
    """Make the backend known to vLLM in this process. Its plugin loader may call this twice."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "deltasync.integrations.vllm_engine", "DeltaSyncEngine")


class Client(Protocol):
    """vLLM's `VLLMWeightSyncClient`: the calls that reach every worker of a server."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> object: ...

    def start_weight_update(self) -> object: ...

    def update_weights(self, update_info: dict[str, Any], /) -> object: ...

    def finish_weight_update(self, weight_version: str | None = None) -> object: ...


class VllmSync(AbstractContextManager["VllmSync"]):
    """Keeps a vLLM server at a trainer's weights.

    Workers receive and stage while they generate. When a version is decided the trainer asks for an
    update, in which they only write; its version becomes the server's weight version. A full sync,
    and a delta too large to be staged, is received and written within the update. vLLM neither
    pauses nor drops its prefix cache for an update: who wants that asks for it around
    `send_weights`.

    Use it as a context manager, or `close` it.

    Args:
        source: The trainer's parameters, by checkpoint name.
        client: Reaches the server. While `send_weights` runs, a thread of this object calls it.
        transport: Of `shared_memory`, `cuda_ipc` or `collective`, listening. Owned from now on.
        workers: Processes of the server that hold weights: tensor times pipeline parallel.
        max_staged_bytes: Memory in each worker for a version that is not written yet.
        options: Of the sender.
        timeout_s: For each wait, here and in the workers.
    """

    def __init__(
        self,
        source: WeightSource,
        client: Client,
        transport: SendTransport,
        *,
        workers: int = 1,
        max_staged_bytes: int = 1 << 30,
        options: SenderOptions | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._source, self._client, self._workers = source, client, workers
        self._link = _link_of(transport)
        self._max_staged_bytes, self._timeout_s = max_staged_bytes, timeout_s
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="deltasync-vllm")
        self._updates: dict[int, Future[None]] = {}
        self._is_behind = False  # workers may wait for an update that failed
        self.sender = WeightSender(source, transport, options=options, tell=self._follow)

    def __exit__(self, *error: object) -> None:
        self.close()

    def connect(self) -> None:
        """Let the server's workers connect, anew if they were connected.

        `send_weights` does so itself after an update that failed.

        Raises TransportTimeout, or what the client raises.
        """
        tensors = self._source.tensors()
        self._client.init_weight_transfer_engine(
            self._link
            | {
                "names": [tensor.name for tensor in tensors],
                "dtypes": [dtype_of(tensor.tensor).name for tensor in tensors],
                "shapes": [list(tensor.tensor.shape) for tensor in tensors],
                "max_staged_bytes": self._max_staged_bytes,
                "timeout_s": self._timeout_s,
            }
        )
        self.sender.wait_for_receivers(self._workers, timeout_s=self._timeout_s)
        self._is_behind = False

    def send_weights(self) -> SyncStats:
        """`WeightSender.send_weights`, with the server's update when it is due.

        Raises what that raises, and what the client raises.
        """
        if self._is_behind:
            self.connect()
        self._updates.clear()
        try:
            stats = self.sender.send_weights(timeout_s=self._timeout_s)
        finally:
            updates = self._updates.values()
            done, unfinished = wait(updates, self._timeout_s)
            self._is_behind = bool(unfinished) or any(update.exception() for update in done)
        if unfinished:
            raise TransportTimeout("the server's update did not end in time")
        for update in updates:
            update.result()
        if not updates:  # the server joined with the trainer's weights
            self._update(stats.version, is_written=True)
        return stats

    def close(self) -> None:
        """End every connection. The server keeps its weights."""
        self.sender.close()
        self._calls.shutdown()

    def _follow(self, moment: Moment) -> None:
        """Ask for the update as soon as workers would wait for it."""
        at_once = moment.num_bytes * _STAGED_PER_BYTE > self._max_staged_bytes
        if moment.version not in self._updates and (moment.is_decided or moment.is_full or at_once):
            self._updates[moment.version] = self._calls.submit(self._update, moment.version)

    def _update(self, version: int, *, is_written: bool = False) -> None:
        """One update. One that breaks off is finished: workers that did not fail wait for that."""
        try:
            self._client.start_weight_update()
            if not is_written:
                self._client.update_weights({"version": version})
            self._client.finish_weight_update(weight_version=str(version))
        except BaseException as error:
            try:
                self._client.finish_weight_update()
            except Exception as other:  # nobody has begun it, or the server is gone
                raise error from other
            raise


def _link_of(transport: SendTransport) -> dict[str, Any]:
    """How a worker connects to a transport."""
    match transport:
        case collective.Sender():
            return {"link": transport.backend, "address": list(transport.address)}
        case cuda_ipc.Sender():
            return {"link": "cuda_ipc", "address": [str(transport.path)]}
        case shared_memory.Sender():
            return {"link": "shared_memory", "address": [str(transport.path)]}
        case _:
            raise ConfigError(f"vLLM's workers cannot connect to a {type(transport).__name__}")
