"""What carries messages at each end, and the calls that wait there. No rule of a sync is here."""

from __future__ import annotations

import math
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from types import FrameType
from typing import Generic, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from deltasync.errors import (
    CallOrderError,
    ConfigError,
    DeltaSyncError,
    ProtocolViolation,
    Refused,
    TransportError,
    TransportTimeout,
    WireError,
)
from deltasync.transports import forks
from deltasync.transports.base import Frame, ReceiveTransport, SendTransport
from deltasync.transports.control.connection import LONGEST_S, Pace, busy_s
from deltasync.wire import messages
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import (
    Abort,
    Attempt,
    Begin,
    Bucket,
    Failed,
    Hello,
    Message,
    Prepare,
    Shares,
)

M = TypeVar("M", bound=BaseModel)

READING_S = 0.3
_MAX_LATE = 64  # messages that do not count, and are taken after a deadline
_WAIT_SHARE = 0.8


class OneCaller:
    """Lets one call in at a time, and refuses others, of whichever thread.

    An interrupt can end a call between any two instructions, also where it begins or cleans up. So
    a call counts while its function runs, and one that ended neither well nor with an error of
    ours or of torch has left things in doubt. A signal handler may raise anything but those.

    Args:
        refusal: What a refused call raises as CallOrderError.
        recover: Called before the next call then, and again if an interrupt ends that too. It puts
            in order what was left.
    """

    def __init__(self, refusal: str, recover: Callable[[], object] = lambda: None) -> None:
        self._refusal, self._recover = refusal, recover
        self._calls: list[FrameType] = []  # their functions, in order of arrival
        forks.inert_in_children(self._forked)

    @contextmanager
    def call(self, depth: int = 2) -> Iterator[None]:
        """While a call is under way, within `plain_mode`. Raises CallOrderError if one is.

        It is the function that enters this, or that of a greater `depth` of frames from here.
        """
        mine = sys._getframe(depth)
        self._calls.append(mine)
        calls = list(self._calls)
        earlier = calls[: calls.index(mine)]
        try:
            if any(map(_is_running, earlier)):
                raise CallOrderError(self._refusal)
            torch._C._set_grad_enabled(False)
            if left := [one for one in earlier if one in self._calls]:
                self._recover()
                for one in left:
                    self._calls.remove(one)
            yield
        except (DeltaSyncError, MemoryError, RuntimeError) as error:
            is_torchs = not isinstance(error, DeltaSyncError)
            if is_torchs or type(error).__module__.startswith("deltasync."):
                self._calls.remove(mine)
            raise
        self._calls.remove(mine)

    @property
    def is_called(self) -> bool:
        """Whether a call is under way."""
        return any(map(_is_running, list(self._calls)))

    def _forked(self) -> None:
        """No call is under way in a child."""
        self._calls = []


def _is_running(function: FrameType) -> bool:
    """Whether a function has not ended, in whichever thread: such a frame cannot be cleared."""
    try:
        function.clear()
    except RuntimeError:
        return True
    return False


def check_seconds(name: str, seconds: float, *, may_be_zero: bool = True) -> None:
    """Raise ConfigError unless an argument of this name is a time that somebody can wait for."""
    is_number = isinstance(seconds, Real)  # callers may have read it from a file
    if is_number and 0 <= seconds <= LONGEST_S and (seconds or may_be_zero):
        return
    least = "0" if may_be_zero else "more than 0"
    raise ConfigError(f"{name} is {seconds!r}: give {least} to {LONGEST_S:,.0f} seconds")


class CallTimeout:
    """The timeout of each wait of a call, and of all of it. Raises ConfigError.

    Args:
        timeout_s: For each wait.
        total_timeout_s: For the whole call, from now on; None for no limit.
    """

    def __init__(self, timeout_s: float, total_timeout_s: float | None = None) -> None:
        check_seconds("timeout_s", timeout_s)
        self._timeout_s, self._ends_at = timeout_s, math.inf
        if total_timeout_s is not None:
            check_seconds("total_timeout_s", total_timeout_s)
            self._ends_at = time.monotonic() + total_timeout_s

    def within(self, total_timeout_s: float) -> CallTimeout:
        """The same for a part of the call, which may take this long from now on.

        One wait does not take all of that: the rest is for those that were not late.
        """
        left_s = min(self.left_s, total_timeout_s)
        return CallTimeout(min(self._timeout_s, _WAIT_SHARE * left_s), left_s)

    @property
    def left_s(self) -> float:
        """Seconds that are left for the whole call; infinite without a limit."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def wait_s(self) -> float:
        """Seconds for the next wait."""
        return min(self._timeout_s, self.left_s)

    @property
    def is_over(self) -> bool:
        """Whether the time for the whole call has passed."""
        return time.monotonic() >= self._ends_at


class SenderLink(Generic[M]):
    """Sends messages to the peers of an epoch and reads their answers, each within `timeout_s`.

    Args:
        transport: The sender's end of a link.
        decode: Returns the message of a header. Raises WireError.

    Attributes:
        transport: What carries them. Owned by whoever has made this.
        limit: How long calls may wait.
    """

    def __init__(self, transport: SendTransport, decode: Callable[[bytes], M]) -> None:
        self.transport, self._decode = transport, decode
        self._epoch: tuple[int, ...] = ()
        self._unread: deque[tuple[int, bytes]] = deque()  # greetings
        self.limit = CallTimeout(60.0)
        self._knowing: tuple[object, set[int]] = None, set()

    @property
    def timeout_s(self) -> float:
        """For the next wait."""
        return self.limit.wait_s

    def open(self, peers: Sequence[int]) -> dict[int, TransportError]:
        """Speak to `peers` from now on. Returns those that could not be reached."""
        if tuple(peers) == self._epoch and all(map(self.transport.is_connected, peers)):
            return {}
        self._epoch = ()
        failed = self.transport.open_epoch(peers, timeout_s=self.timeout_s)
        if not failed:
            self._epoch = tuple(peers)
        return failed

    def greetings(self, *, timeout_s: float) -> Iterator[tuple[int, M | WireError, int]]:
        """The first message of each new peer, and its bytes.

        Reading many of them takes time: what is left after `READING_S` is for the next call.
        """
        end = math.inf
        while time.monotonic() < end:
            if not self._unread:
                self._unread.extend(self.transport.poll(timeout_s=timeout_s))
            if not self._unread:
                return
            timeout_s, end = 0.0, min(end, time.monotonic() + READING_S)
            peer, data = self._unread.popleft()
            yield peer, self._decoded(data), len(data)

    def send(self, message: M, payload: Tensor | None = None) -> None:
        """Send to every peer of the epoch. Raises TransportError after dropping whom it lost."""
        header = encode(message, payload_bytes=0 if payload is None else len(payload))
        self.transport.send(Frame(header, payload), timeout_s=self.timeout_s)

    def knows(self, shares: object) -> bool:
        """Whether every peer of the epoch was `told` of these shares."""
        known, peers = self._knowing
        return known is shares and peers.issuperset(self._epoch)

    def told(self, shares: object) -> None:
        """Every peer of the epoch has been told of these shares."""
        known, peers = self._knowing
        self._knowing = shares, {*self._epoch, *(peers if known is shares else ())}

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] to pack the next payload into. Raises what `send` raises."""
        return self.transport.buffer(num_bytes, timeout_s=self.timeout_s)

    def hint(self, message: M) -> None:
        """Send to the peers of the epoch, if there is one; losing one is found later."""
        if self._epoch:
            with suppress(TransportError):
                self.send(message)

    def replies(self) -> dict[int, M | DeltaSyncError]:
        """The next answer of each peer of the epoch, or why there is none."""
        return self._read(self.transport.collect_replies(timeout_s=self.timeout_s))

    def some_replies(
        self, peers: Collection[int], deadline: float
    ) -> dict[int, M | DeltaSyncError]:
        """The next answers of some of `peers`: as soon as one has answered, or is lost.

        After `deadline`, of all of them: those that have not answered are late, and are dropped.
        """
        left_s = deadline - time.monotonic()
        replies = self.transport.some_replies(peers, timeout_s=max(0.0, left_s))
        for peer in set(peers) - replies.keys() if left_s <= 0 else ():
            replies[peer] = TransportTimeout("did not answer in time")
            self.drop(peer)
        return self._read(replies)

    def last_words(self, peers: Sequence[int]) -> dict[int, str]:
        """Why those of `peers` have failed that are gone and said so. Ends the epoch if one is."""
        gone = [peer for peer in peers if not self.transport.is_connected(peer)]
        if not gone:
            return {}
        self._epoch = ()
        try:
            # Not with the others: they read a payload still.
            self.transport.open_epoch(gone, timeout_s=self.timeout_s)
            replies = self.transport.collect_replies(timeout_s=0)
        except TransportError:
            return {}
        said = self._read(replies)
        return {peer: reason_of(m) for peer, m in said.items() if isinstance(m, Failed)}

    def drop(self, peer: int) -> None:
        """End the connection to a peer."""
        if peer in self._epoch:
            self._epoch = ()
        self.transport.drop(peer)

    def reset(self) -> None:
        """End every connection, in whatever state an interrupt has left it."""
        self._epoch = ()
        self._unread.clear()
        self.transport.reset()

    def _decoded(self, data: bytes) -> M | WireError:
        try:
            return self._decode(data)
        except WireError as error:
            return error

    def _read(self, replies: Mapping[int, bytes | TransportError]) -> dict[int, M | DeltaSyncError]:
        return {
            peer: reply if isinstance(reply, TransportError) else self._decoded(reply)
            for peer, reply in replies.items()
        }


class ReceiverLinks:
    """The link to the rank that speaks for the trainer, and to the others that send payloads.

    What comes on a lane counts for the attempt that has begun on the first link; what is left of
    earlier ones, or of one that was aborted, is passed over here.

    Args:
        links: The first of them for all that is said. Owned: `close` closes them.

    Attributes:
        progress: `ReceiveTransport.progress` of all that is awaited.
        follows_loss: Of the message that was received last, as in `Frame`.
        are_private: Whether nobody else can write to payloads, see `ReceiveTransport`.
    """

    def __init__(self, links: Sequence[ReceiveTransport]) -> None:
        self._links = list(links)
        self.are_private = all(link.is_private for link in links)
        self.progress = links[0].progress if len(links) == 1 else self._progress
        self._attempts = [0] * len(links)  # that lanes are at; the first, that has begun
        self._ended = [True] * len(links)
        self._is_aborted = False
        self.follows_loss = False
        self._last = 0

    def connect(self, hello: Hello, *, timeout_s: float) -> None:
        """Reconnect all of them, the first one last. Raises TransportTimeout, PeerLost."""
        deadline = time.monotonic() + timeout_s
        self._attempts, self._ended = [0] * len(self._links), [True] * len(self._links)
        self._is_aborted = False
        if len(self._links) > 1:
            connection = uuid.uuid4().hex
            for link in self._links[1:]:
                lane = encode(messages.Lane(connection=connection))
                link.connect(lane, timeout_s=max(0.0, deadline - time.monotonic()))
            lanes = {"connection": connection, "lanes": len(self._links) - 1}
            hello = hello.model_copy(update=lanes)
        timeout_s = max(0.0, deadline - time.monotonic())
        self._links[0].connect(encode(hello), timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> tuple[int, Message, Tensor | None]:
        """(lane, message, payload): the next one that counts. See `ReceiveTransport.receive`.

        Args:
            timeout_s: For it to come.

        Raises WireError, and Refused when the trainer turns this receiver away.
        """
        deadline, num_late = time.monotonic() + timeout_s, 0
        while num_late <= _MAX_LATE:
            num_late += time.monotonic() >= deadline
            lane, frame = self._next(deadline)
            arrived_bytes = 0 if frame.payload is None else len(frame.payload)
            message, _ = decode(frame.header, arrived_bytes=arrived_bytes)
            if isinstance(message, messages.Refused):
                raise Refused(kind=message.error, message=message.reason)
            if self._counts(lane, message):
                self.follows_loss = frame.follows_loss
                return lane, message, frame.payload
        raise TransportTimeout("nothing came in time that counts")

    def reply(self, message: Message, *, timeout_s: float) -> None:
        """Answer the rank that speaks for the trainer. Raises PeerLost."""
        self._links[0].reply(encode(message), timeout_s=timeout_s)

    def _progress(self) -> None:
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
            case Attempt() if lane:
                self._go_on_to(message.number, lane)
                return False
            case Begin() if lane == 0:
                self._go_on_to(message.attempt, lane)
                self._is_aborted = False
            case Abort() if lane == 0:
                self._is_aborted = True
            case Bucket() | Shares() | Prepare() | Abort():
                self._ended[lane] = isinstance(message, Prepare | Abort)
            case _ if lane:
                raise ProtocolViolation(f"{message.kind} on lane {lane}")
        is_current = self._attempts[lane] == self._attempts[0] and not self._is_aborted
        return lane == 0 or (is_current and not isinstance(message, Abort))

    def _go_on_to(self, attempt: int, lane: int) -> None:
        if attempt <= self._attempts[lane] and len(self._links) > 1:
            raise ProtocolViolation(f"attempt {attempt} after {self._attempts[lane]}")
        self._attempts[lane], self._ended[lane] = attempt, False

    def _awaited(self) -> list[int]:
        """The first link, and lanes on which something is to come, in turn."""
        now = self._attempts[0]
        lanes = [
            lane
            for lane in range(1, len(self._links))
            if self._attempts[lane] < now or (self._attempts[lane] == now and not self._ended[lane])
        ]
        return sorted([0, *lanes], key=lambda lane: (lane <= self._last, lane))

    def _next(self, deadline: float) -> tuple[int, Frame]:
        """What comes first, on any lane: nobody waits for one lane alone, whose payload may want
        other receivers, which wait for another.
        """
        if self._awaited() == [0]:
            timeout_s = max(0.0, deadline - time.monotonic())
            return 0, self._links[0].receive(timeout_s=timeout_s)
        pace = Pace(busy_s(self._links[0].device.type))
        while True:
            for lane in self._awaited():
                with suppress(TransportTimeout):
                    frame = self._links[lane].receive(timeout_s=0.0)
                    self._last = lane
                    return lane, frame
            if time.monotonic() >= deadline:
                raise TransportTimeout("nothing came in time")
            time.sleep(pace.pause_s(deadline))


def reason_of(reply: Message | DeltaSyncError, *, answered: str = "answered") -> str:
    """Why a peer failed: what it said, what it did not answer, or `answered` with another kind."""
    match reply:
        case Failed(error=error, reason=reason):
            return f"{error}: {reason}"
        case DeltaSyncError():
            return f"{type(reply).__name__}: {reply}"
        case _:
            return f"ProtocolViolation: {answered} with {reply.kind}"


def message_of(header: bytes) -> Message:
    """The message of a header that has no payload. Raises WireError."""
    return decode(header)[0]
