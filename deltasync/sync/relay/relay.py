"""A receiver that forwards what it has verified to receivers of its own."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from deltasync.errors import (
    CallOrderError,
    ConfigError,
    DeltaSyncError,
    DirtyReceiver,
    EngineFailed,
    NoReceivers,
    SyncAborted,
    TransportClosed,
    TransportTimeout,
)
from deltasync.sync.held import follow, proved
from deltasync.sync.options import ReceiverOptions, SenderOptions
from deltasync.sync.protocol.links import check_seconds
from deltasync.sync.receiver import WeightReceiver
from deltasync.sync.relay.kept import KeptDeltas
from deltasync.sync.relay.weights import RelayedWeights
from deltasync.sync.sender import WeightSender
from deltasync.sync.staging_thread import StagingThread
from deltasync.sync.stats import SyncStats
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports.base import Closing, ReceiveTransport, SendTransport

logger = logging.getLogger(__name__)

_TURN_S = 0.05  # between two looks at who has come
_RETRY_S = 1.0  # after a version that nobody took
_MIN_KEPT_BYTES = 64 << 20


class Relay(Closing):
    """Receives a trainer's weights once, and sends them to the receivers of its region.

    To its trainer a relay is an engine of one rank; to its receivers it is a trainer. It holds the
    model in host memory, and what deltas bring until its receivers have it, so that a delta is
    neither compared nor read from the model again. Versions and the stream id are the trainer's.

    A version is forwarded once it is decided, written and read back here: receivers below lag by
    one hop, and have it whole or not at all. While it is forwarded the next one is staged; that is
    committed when the forwarding has ended, after `timeout_s` at the latest. A receiver that comes
    later, or has missed versions, gets a full sync from the relay's copy, also if the trainer is
    gone.

    Use it from one thread: `with Relay(...) as relay: while True: relay.forward()`.

    Args:
        upstream: The receiver's end of a link to the trainer, or to another relay. Owned.
        downstream: The sender's end of the region's link. Owned.
        lanes: For a trainer with several ranks: the links to its ranks 1, 2 ... Owned too.
        name: Of this relay, unique among its trainer's engines; None for one that nothing else has.
        memory: A file that keeps the model, on tmpfs or a fast disk: a relay that is restarted with
            it, by whatever it was ended, joins by digest if it still holds the version. Only one
            relay may use it. None for memory of the process.
        timeout_s: How long a version may take to be forwarded. Choose less than the trainer's
            timeout, or the trainer drops the relay when a receiver below is slow.
        bucket_bytes: Largest payload sent; None for 64 MiB.
        compression: Of the payloads sent. Codecs of values that need the old weights are not used,
            since the relay holds the new ones by then.
        max_kept_bytes: Payloads kept until they are forwarded; None for a quarter of the model, at
            least 64 MiB. A delta beyond is forwarded as a full sync.
        options: Of the receiver: memory, scrub.

    Attributes:
        name: Of this relay.
        receiver: What receives; `export_weights` writes what it holds.
        last_error: Why the last version was not received or not forwarded; None after one that was.
    """

    def __init__(
        self,
        upstream: ReceiveTransport,
        downstream: SendTransport,
        *,
        lanes: Sequence[ReceiveTransport] = (),
        name: str | None = None,
        memory: str | Path | None = None,
        timeout_s: float = 20.0,
        bucket_bytes: int | None = None,
        compression: Literal["none", "zstd"] = "none",
        max_kept_bytes: int | None = None,
        options: ReceiverOptions | None = None,
    ) -> None:
        check_seconds("timeout_s", timeout_s, may_be_zero=False)
        if max_kept_bytes is not None and max_kept_bytes < 0:
            raise ConfigError(f"max_kept_bytes is {max_kept_bytes}: give 0 or more")
        self.name = name = name or f"relay-{uuid.uuid4().hex[:8]}"
        self._timeout_s, self._max_kept_bytes = timeout_s, max_kept_bytes
        self.last_error: Exception | None = None
        self._kept = KeptDeltas(self._limit)
        self._weights = RelayedWeights(
            SenderOptions(bucket_bytes=bucket_bytes, compression=compression), self._kept
        )
        self._target = CopiedTarget(path=memory)
        self.receiver = WeightReceiver(
            self._target, upstream, lanes=lanes, engine=name, options=options
        )
        follow(self.receiver, self._kept)
        self._sender = WeightSender(self._weights, downstream, admits=lambda engine: engine != name)
        self._staging = StagingThread(self.receiver)
        self._is_started = self._is_ready = False
        self._retry_at_s = 0.0

    @property
    def version(self) -> int | None:
        """The version held here; None before the first."""
        return self.receiver.version

    @property
    def num_receivers(self) -> int:
        """Receivers that hold the version forwarded last."""
        return self._sender.num_receivers

    @property
    def engines(self) -> frozenset[str]:
        """Names of their engines."""
        return self._sender.engines

    def forward(self, *, timeout_s: float = 1.0) -> SyncStats | None:
        """Wait for a new version, or for receivers that join, and forward what is held.

        Errors of a sync, above or below, are logged and kept in `last_error`: the relay rejoins,
        receivers below rejoin, and both go on with what they hold.

        Args:
            timeout_s: How long to wait. To forward takes up to the relay's own `timeout_s` more.

        Returns:
            What was sent to the receivers; None if nothing was.

        Raises:
            TransportClosed: The relay was closed.
        """
        check_seconds("timeout_s", timeout_s)
        if not self._is_started:
            self._is_started = True
            self._staging.__enter__()
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if self._staging.wait_staged(timeout_s=min(_TURN_S, left_s)):
                self._commit()
            elif self._staging.last_error is not None:
                self.last_error, self._staging.last_error = self._staging.last_error, None
            is_shown = self._show()
            if self._is_due() and is_shown:
                return self._send()
            if left_s == 0:
                return None

    def close(self) -> None:
        """End all connections. Receivers below keep serving what they hold."""
        self.receiver.close()
        self._staging.__exit__(None, None, None)
        self._sender.close()
        self._target.close()

    def _limit(self) -> int:
        if self._max_kept_bytes is not None:
            return self._max_kept_bytes
        num_bytes = sum(tensor.nbytes for tensor in self._target.tensors.values())
        return max(_MIN_KEPT_BYTES, num_bytes // 4)

    def _commit(self) -> None:
        """Take over what is staged."""
        try:
            version = self._staging.commit()
        except TransportClosed:
            raise
        except DeltaSyncError as error:
            self._note(error)
            return
        self.last_error, self._retry_at_s = None, 0.0
        logger.info("%s holds v%d", self.name, version)

    def _show(self) -> bool:
        """Look at what is held. Whether it may be sent."""
        try:
            with proved(self.receiver) as held:
                self._weights.show(held)
                self._sender.stream_id = held.stream_id
        except DirtyReceiver:
            return False
        except CallOrderError:  # on its way to another version: what was shown is intact
            return self._weights.version is not None
        return True

    def _is_due(self) -> bool:
        """Whether members lack the version, or receivers have come."""
        try:
            self._sender.wait_for_receivers(self.num_receivers + 1, timeout_s=0)
        except (TransportTimeout, EngineFailed):  # nobody has come; who is gone has been noted
            is_late = self._weights.is_new and self.num_receivers > 0
            return is_late and time.monotonic() >= self._retry_at_s
        return True

    def _send(self) -> SyncStats | None:
        try:
            stats = self._sender.send_weights(
                timeout_s=self._timeout_s, total_timeout_s=self._timeout_s
            )
        except NoReceivers:
            return None
        except (ConfigError, SyncAborted, TransportTimeout) as error:
            self._retry_at_s = time.monotonic() + _RETRY_S
            self._note(error)
            return None
        self.last_error = None
        return stats

    def _note(self, error: Exception) -> None:
        logger.warning("%s: %s: %s", self.name, type(error).__name__, error)
        self.last_error = error
