"""Trainer ranks other than rank 0: each compares and sends what it holds when rank 0 orders it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from deltasync.delta.coding import Coding
from deltasync.delta.modes import plain_mode
from deltasync.delta.snapshot import Plan
from deltasync.errors import (
    DeltaSyncError,
    MalformedMessage,
    PeerLost,
    SyncAborted,
    TransportError,
    TransportTimeout,
    VersionGap,
)
from deltasync.sync.arguments import check_coding
from deltasync.sync.group import orders
from deltasync.sync.group.model import digests_told
from deltasync.sync.group.work import RankWork
from deltasync.sync.options import SenderOptions
from deltasync.sync.protocol.links import (
    CallTimeout,
    OneCaller,
    SenderLink,
    check_seconds,
    message_of,
)
from deltasync.sync.protocol.round import Emitter, SentBuckets
from deltasync.sync.source.tensors import WeightSource
from deltasync.sync.source.weights import OwnWeights
from deltasync.sync.stats import SyncStats
from deltasync.transports.address import Address
from deltasync.transports.base import Closing, ReceiveTransport, SendTransport
from deltasync.transports.control.connection import LONGEST_S, left_s
from deltasync.wire.frame import encode
from deltasync.wire.messages import Abort, Attempt, Failed, Lane, as_text

T = TypeVar("T")

_REPLY_TIMEOUT_S = 30.0
_TURN_S = 0.2
_CONNECT_S = 1.0  # with a secret, how long one attempt waits to be let in
_PATIENCE = 10  # timeouts of rank 0 that may pass between two orders

_PROBLEMS = (DeltaSyncError, MemoryError, RuntimeError)  # torch raises RuntimeErrors


class TrainerRank(Closing):
    """A trainer rank other than rank 0: see `WeightSender`'s `group`.

    Call `send_weights` as often as rank 0 does, from one thread: this is how ranks agree that they
    send weights of the same step. If a rank has missed a call, its next call stands for the missed
    one and raises.

    Args:
        source: What this rank holds of the parameters; read, never written.
        transport: The sender's end of the lanes to all receivers. Owned: `close` closes it.
        link: The link to rank 0. Owned too.
        rank: This rank, from 1.
        world: Number of ranks of the trainer.
        options: The same as on rank 0.

    Attributes:
        source: What is sent: the source without what `leave_out` names.
        world: Number of ranks of the trainer.
        version: The last version that this rank knows to be decided.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: SendTransport,
        link: ReceiveTransport,
        *,
        rank: int,
        world: int,
        options: SenderOptions | None = None,
    ) -> None:
        self.version = 0
        self.world, options = world, options or SenderOptions()
        self._rank = rank
        check_coding(options)
        self._weights = OwnWeights(source, options)
        self._work = RankWork(self._weights, rank, world)
        self.source = self._weights.source
        self._lanes = LaneSender(transport)
        self._address = Address.of(transport)
        self._link = link
        self._is_connected = False
        self._call = 0
        self._next: orders.Order | None = None  # of a later call, and already received
        self._trains_meanwhile = False
        refusal = "a sync is under way; a TrainerRank is used by one thread"
        self._caller = OneCaller(refusal, self._start_over)

    def refresh_source(self) -> None:
        """See `WeightSender.refresh_source`."""
        self._weights.refresh_source()

    def send_weights(
        self,
        *,
        timeout_s: float = 60.0,
        total_timeout_s: float | None = None,
        on_source_read: Callable[[], None] | None = None,
    ) -> SyncStats:
        """Take part in a sync. Returns the stats of rank 0.

        Args:
            timeout_s: The same as on rank 0. The wait for each of its orders, not for the whole
                call, may take ten times as long.
            total_timeout_s: For the whole call, on all ranks; None for no limit.
            on_source_read: See `WeightSender.send_weights`. Pass it on all ranks or on none.

        Raises:
            SyncAborted: The sync failed on some rank; the next one covers it.
            DeltaSyncError: This rank could not do its part.
        """
        check_seconds("timeout_s", timeout_s)
        limit = CallTimeout(min(_PATIENCE * timeout_s, LONGEST_S), total_timeout_s)
        with plain_mode(), self._caller.call():
            done, error = self._send_weights(limit, on_source_read)
        if error is not None:
            raise error
        if done.stats is None:
            raise SyncAborted(f"rank 0: {done.error}")
        return done.stats

    def _send_weights(
        self, limit: CallTimeout, on_source_read: Callable[[], None] | None
    ) -> tuple[orders.Done, Exception | None]:
        """How rank 0 has ended the call, and what went wrong here, which rank 0 was told."""
        self._call += 1
        self._trains_meanwhile = on_source_read is not None
        try:
            with self._weights.one_call(on_source_read):
                error = None
                while not isinstance(order := self._receive(limit.wait_s), orders.Done):
                    error = self._carry_out(order) or error
                self._work.undecided = None
        except _PROBLEMS as problem:
            if not isinstance(problem, SyncAborted):  # rank 0 was not told
                self._start_over()
            raise
        self.version = order.version
        return order, error

    def close(self) -> None:
        """Close every connection."""
        self._lanes.link.transport.close()
        self._link.close()

    def _receive(self, patience_s: float) -> orders.Order:
        """The next order of this call. Raises SyncAborted if none comes within `patience_s`."""
        while True:
            order, self._next = self._next or self._hear(time.monotonic() + patience_s), None
            self._work.resolve(order.version)
            if order.call == self._call:
                return order
            if order.call > self._call:
                self._next = order
                raise SyncAborted("rank 0 has given this sync up")
            if not isinstance(order, orders.Done):
                self._answer(_failed(SyncAborted("has left this sync")))

    def _hear(self, deadline: float) -> orders.Order:
        try:
            if not self._is_connected:
                here = orders.Here(
                    rank=self._rank,
                    world=self.world,
                    capture=self._work.captured,
                    address=self._address,
                )
                connect = partial(self._link.connect, encode(here))
                self._in_turns(lambda s: connect(timeout_s=s), _CONNECT_S, deadline)
                self._is_connected = True
            frame = self._in_turns(lambda s: self._link.receive(timeout_s=s), _TURN_S, deadline)
            order = orders.decode(frame.header)
        except TransportTimeout as error:
            raise SyncAborted(f"rank 0 of the trainer says nothing: {error}") from error
        except PeerLost as error:
            self._lose()
            raise SyncAborted(f"rank 0 of the trainer is gone: {error}") from error
        if not isinstance(order, orders.Order):
            raise MalformedMessage(f"{order.kind} is no order")
        return order

    def _in_turns(self, call: Callable[[float], T], turn_s: float, deadline: float) -> T:
        """Wait in a call for seconds that it is given, again and again until the deadline.

        Accepts lanes meanwhile: receivers connect them before they greet rank 0, which lets ranks
        in when it sends, and may wait for receivers before.
        """
        while True:
            self._lanes.listen()
            try:
                return call(min(turn_s, left_s(deadline)))
            except TransportTimeout:
                if time.monotonic() >= deadline:
                    raise

    def _carry_out(self, order: orders.Order) -> Exception | None:
        """Answer an order. Returns what went wrong here, after rank 0 was told."""
        answer: orders.Answer
        problem: Exception | None = None
        try:
            if not self._may(order):
                raise SyncAborted("training goes on meanwhile; the next sync covers this one")
            if isinstance(order, orders.Send):
                answer = self._send(order)
            else:
                answer = self._work.answer(order)
        except _PROBLEMS as error:
            problem, answer = error, _failed(error)
        except Exception as error:  # of the source's own
            with suppress(SyncAborted):
                self._answer(_failed(error))
            raise
        self._answer(answer)
        if isinstance(problem, VersionGap):  # rank 0 has to see that this snapshot is of no use
            self._start_over()
        return problem

    def _may(self, order: orders.Order) -> bool:
        """Whether the source may still be read, or looked up, as the order needs it."""
        match order:
            case orders.Declare() | orders.Capture():
                return not self._trains_meanwhile
            case orders.Measure() if order.maxima is not None:  # for a capture
                return not self._trains_meanwhile
            case orders.Measure() | orders.Compare():
                return not self._weights.is_released
        return True

    def _send(self, order: orders.Send) -> orders.Sent:
        plan: Plan
        if order.is_delta:
            assert self._work.undecided is not None
            plan = self._work.undecided[1]
        else:
            plan = self._weights.full(ways=self.world)
        buckets = self._lanes.send(plan, order, self._weights.options.compression)
        self._weights.release()
        if buckets.lost:
            return orders.Sent(digests=(), buckets=buckets)
        digests = digests_told(plan.ledger, order.copies, len(self._weights.layout.specs))
        return orders.Sent(digests=digests, buckets=buckets)

    def _answer(self, answer: orders.Answer) -> None:
        """Reply to rank 0. Raises SyncAborted if it is gone."""
        try:
            self._link.reply(encode(answer), timeout_s=_REPLY_TIMEOUT_S)
        except TransportError as error:
            self._lose()
            raise SyncAborted(f"rank 0 of the trainer is gone: {error}") from error

    def _lose(self) -> None:
        """The connection is gone, and orders that came by it are void."""
        self._is_connected, self._next = False, None

    def _start_over(self) -> None:
        """Give the snapshot up. Rank 0 sees this when this rank reconnects; receivers rejoin."""
        self._lose()
        self._work.captured = None
        with suppress(TransportError):
            self._link.disconnect()
            self._lanes.link.reset()


def _failed(error: Exception) -> Failed:
    return Failed(version=None, error=type(error).__name__, reason=as_text(error))


class LaneSender:
    """Sends plans to receivers, by the connections that they have named to both ranks.

    Args:
        transport: The sender's end of a link. Owned.

    Attributes:
        link: What owns it.
    """

    def __init__(self, transport: SendTransport) -> None:
        self.link = SenderLink(transport, message_of)
        self._peers: dict[str, int] = {}

    def send(self, plan: Plan, order: orders.Send, compression: Coding) -> SentBuckets:
        """Send all of a plan. If receivers are lost, none gets all; the result names them."""
        self.link.limit = CallTimeout(order.timeout_s)
        if lost := self._absent(order.receivers, order.timeout_s):
            return SentBuckets(lost=lost)
        by_peer = {self._peers[receiver]: receiver for receiver in order.receivers}
        if failed := self.link.open(list(by_peer)):
            return SentBuckets(lost={by_peer[peer]: str(why) for peer, why in failed.items()})
        try:
            return self._send_all(plan, order, compression)
        except TransportError as error:
            is_connected = self.link.transport.is_connected
            gone = {name: str(error) for p, name in by_peer.items() if not is_connected(p)}
            if not gone:
                raise
            return SentBuckets(lost=gone)

    def listen(self, timeout_s: float = 0.0) -> None:
        """Accept lanes that have connected."""
        for peer, greeting, _ in self.link.greetings(timeout_s=timeout_s):
            if isinstance(greeting, Lane):
                self._peers[greeting.connection] = peer
            else:
                self.link.drop(peer)

    def _send_all(self, plan: Plan, order: orders.Send, compression: Coding) -> SentBuckets:
        """Send the frames of a plan, or an abort, so that receivers do not wait in vain."""
        version = order.version + order.is_delta
        emitter = Emitter(plan, version, compression=compression, buffer=self.link.buffer)
        self.link.send(Attempt(number=order.attempt))
        try:
            for message, payload in emitter.frames(with_shares=order.with_shares):
                self.link.send(message, payload)
        except BaseException:
            with suppress(TransportError):
                self.link.send(Abort(version=version, reason="a rank of the trainer failed"))
            raise
        self.link.send(emitter.prepare())
        return emitter.sent

    def _absent(self, receivers: Sequence[str], timeout_s: float) -> dict[str, str]:
        """Why there is no lane to some of the receivers, by receiver.

        Waits for lanes that have not connected yet. A lane that is gone does not reconnect.
        """
        deadline = time.monotonic() + timeout_s
        self.listen()
        while not self._peers.keys() >= set(receivers):
            rest = deadline - time.monotonic()
            if rest <= 0 or self._gone() & set(receivers):
                break
            self.listen(rest)
        for name in self._gone():
            del self._peers[name]
        return {name: "its lane is gone" for name in receivers if name not in self._peers}

    def _gone(self) -> set[str]:
        is_connected = self.link.transport.is_connected
        return {name for name, peer in self._peers.items() if not is_connected(peer)}
