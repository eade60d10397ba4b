"""The lanes of one trainer rank: its payloads to receivers, with which rank 0 runs the protocol."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from deltasync.delta.coding import Coding
from deltasync.delta.snapshot import Plan
from deltasync.errors import TransportError
from deltasync.sync.group import orders
from deltasync.sync.protocol.links import CallTimeout, SenderLink, message_of
from deltasync.sync.protocol.round import Emitter, SentBuckets
from deltasync.transports.base import SendTransport
from deltasync.wire.messages import Abort, Attempt, Lane


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
