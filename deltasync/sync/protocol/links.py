"""A receiver's links to a trainer of several ranks: everything they send, as if from one link."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from torch import Tensor

from deltasync.errors import ProtocolViolation, Refused, TransportTimeout
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.transports.control.connection import BUSY_S, Deadline, Pace
from deltasync.wire import messages
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import Abort, Attempt, Begin, Bucket, Hello, Message, Prepare

_CATCH_UP_S = 10.0  # a rank may have kernels to compile
_CATCH_UP_SHARE = 0.25  # at most, of how long ranks wait for receivers that do not listen to them


class ReceiverLinks:
    """The link to the rank that speaks for the trainer, and to the others that send payloads.

    What comes on a lane counts for the attempt that has begun on the first link; what is left of
    earlier ones, or of one that was aborted, is passed over here.

    Args:
        links: The first of them for all that is said. Owned: `close` closes them.
        max_payload_bytes: Largest payload accepted.
    """

    def __init__(self, links: Sequence[ReceiveTransport], max_payload_bytes: int) -> None:
        self._links = list(links)
        self._max_payload_bytes = max_payload_bytes
        self._attempts = [0] * len(links)  # that lanes are at; the first, that has begun
        self._ended = [True] * len(links)
        self._told, self._is_aborted = 0, False
        self._last = 0
        self._catch_up_s = _CATCH_UP_S
        self._late: set[int] = set()  # waited for in vain, and silent since
        self._kept: dict[int, Frame] = {}  # by lane: what has come before its turn

    def connect(self, hello: Hello, *, timeout_s: float) -> None:
        """Reconnect all of them, the first one last. Raises TransportTimeout, PeerLost."""
        deadline = Deadline(timeout_s)
        self._attempts, self._ended = [0] * len(self._links), [True] * len(self._links)
        self._told, self._is_aborted = 0, False
        self._late.clear()
        self._kept.clear()
        if len(self._links) > 1:
            connection = uuid.uuid4().hex
            for link in self._links[1:]:
                lane = encode(messages.Lane(connection=connection))
                link.connect(lane, timeout_s=deadline.remaining_s)
            lanes = {"connection": connection, "lanes": len(self._links) - 1}
            hello = hello.model_copy(update=lanes)
        self._links[0].connect(encode(hello), timeout_s=deadline.remaining_s)

    def receive(
        self, *, timeout_s: float, reached: Sequence[tuple[int, int]] = ()
    ) -> tuple[int, Message, Tensor | None]:
        """(lane, message, payload): the next one that counts. See `ReceiveTransport.receive`.

        Args:
            timeout_s: For it to come.
            reached: How far each lane has come, to take payloads first of those that lag behind the
                others; not for ever, since payloads of other lanes may be what they are held up by.

        Raises WireError, and Refused when the trainer turns this receiver away.
        """
        end = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, end - time.monotonic())
            if len(self._links) == 1:
                lane, frame = 0, self._links[0].receive(timeout_s=left_s)
            else:
                lane, frame = self._next(Deadline(left_s), reached)
            message, _ = decode(
                frame.header,
                max_payload_bytes=self._max_payload_bytes,
                arrived_bytes=0 if frame.payload is None else len(frame.payload),
            )
            if isinstance(message, messages.Refused):
                raise Refused(kind=message.error, message=message.reason)
            if self._counts(lane, message):
                return lane, message, frame.payload

    def reply(self, message: Message, *, timeout_s: float) -> None:
        """Answer the rank that speaks for the trainer. Raises PeerLost."""
        self._links[0].reply(encode(message), timeout_s=timeout_s)

    def progress(self) -> None:
        """`ReceiveTransport.progress` of all that is awaited."""
        for lane in self._awaited():
            self._links[lane].progress()

    def disconnect(self) -> None:
        """End all connections. Idempotent."""
        for link in self._links:
            link.disconnect()

    def close(self) -> None:
        """End them for good. May be called from any thread."""
        for link in self._links:
            link.close()

    def _counts(self, lane: int, message: Message) -> bool:
        """Take note of where a lane stands. Whether the message is part of the attempt."""
        match message:
            case Attempt(number=number):
                if number <= self._attempts[lane]:
                    raise ProtocolViolation(f"attempt {number} after {self._attempts[lane]}")
                if lane == 0:
                    self._told = number
                else:
                    self._attempts[lane], self._ended[lane] = number, False
                return False
            case Begin() if lane == 0:
                self._attempts[0], self._is_aborted = self._told, False
                self._catch_up_s = min(_CATCH_UP_S, _CATCH_UP_SHARE * message.timeout_s)
            case Abort() if lane == 0:
                self._is_aborted = True
            case Bucket() | Prepare() | Abort():
                self._ended[lane] = not isinstance(message, Bucket)
            case _ if lane:
                raise ProtocolViolation(f"{message.kind} on lane {lane}")
        is_current = self._attempts[lane] == self._attempts[0] and not self._is_aborted
        return lane == 0 or (is_current and not isinstance(message, Abort))

    def _awaited(self) -> list[int]:
        """The first link, and lanes on which something is to come, in turn."""
        now = self._attempts[0]
        lanes = [
            lane
            for lane in range(1, len(self._links))
            if self._attempts[lane] < now or (self._attempts[lane] == now and not self._ended[lane])
        ]
        return sorted([0, *lanes], key=lambda lane: (lane <= self._last, lane))

    def _first(self, reached: Sequence[tuple[int, int]]) -> list[int]:
        """Lanes whose payloads come first: those that lag behind, and those not waited for."""
        lanes = self._awaited()
        least = min((reached[n] for n in lanes if reached and n not in self._late), default=None)
        if least is None:
            return lanes
        return [lane for lane in lanes if lane in self._late or reached[lane] == least]

    def _next(self, deadline: Deadline, reached: Sequence[tuple[int, int]]) -> tuple[int, Frame]:
        """Whatever comes first. Nobody waits for long for one lane alone: its payload may want
        other receivers, which wait for another.
        """
        if self._awaited() == [0] and not self._kept:
            return 0, self._links[0].receive(timeout_s=deadline.remaining_s)
        pace = Pace(BUSY_S[self._links[0].capabilities.devices[0]])
        patience = Deadline(self._catch_up_s)
        while True:
            first = self._first(reached)
            for lane in self._awaited():
                frame = self._look(lane)
                if frame is not None and (lane in first or frame.payload is None):
                    del self._kept[lane]
                    self._last = lane
                    self._late.discard(lane)
                    return lane, frame
            if patience.passed:
                self._late.update(first)
            if deadline.passed:
                raise TransportTimeout("nothing came in time")
            time.sleep(pace.pause_s(deadline))

    def _look(self, lane: int) -> Frame | None:
        """What is next on a lane, if it has come. So an abort is seen, and the loss of a lane,
        also where a payload has to wait for its turn.
        """
        if lane not in self._kept:
            try:
                self._kept[lane] = self._links[lane].receive(timeout_s=0.0)
            except TransportTimeout:
                return None
        return self._kept[lane]
