"""Rank 0's link to the other ranks of a trainer: calls, orders, answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from deltasync.errors import DeltaSyncError, SyncAborted, TransportError
from deltasync.sync.group import orders
from deltasync.sync.protocol.links import CallTimeout, SenderLink
from deltasync.sync.stats import SyncStats
from deltasync.transports.address import Address
from deltasync.transports.base import Closing, SendTransport
from deltasync.wire.messages import Failed, as_text

A = TypeVar("A", bound=orders.Answer)


class TrainerGroup(Closing):
    """The other ranks of a trainer, passed to the `WeightSender` of rank 0 as its `group`.

    Every rank must call `send_weights` equally often. If another rank fails, rank 0 raises why.

    Args:
        link: A link of any transport to the other ranks. Owned: `close` closes it.
        world: Number of ranks of the trainer.

    Attributes:
        world: The same.
        version: Returns the version that receivers hold; the sender sets it.
        captures: By rank, the capture that its snapshot comes from.
        addresses: By rank, the address that it sends from, if its transport has one.
    """

    def __init__(self, link: SendTransport, world: int) -> None:
        self._link, self.world = SenderLink(link, orders.decode), world
        self.version: Callable[[], int] = lambda: 0
        self.captures: dict[int, str | None] = {}
        self.addresses: dict[int, Address | None] = {}
        self._is_called = False  # whether a call is under way
        self._peers: dict[int, int] = {}  # by rank
        self._call = 1
        self._is_owed = False  # whether there are answers that were not read

    @contextmanager
    def one_call(
        self, outcome: Callable[[], SyncStats | None], limit: CallTimeout
    ) -> Iterator[None]:
        """The context of one call of `send_weights`, in which all ranks take part.

        Args:
            outcome: Called at the end: returns the stats. The other ranks return those stats, or
                raise what this rank raises.
            limit: How long it may wait for the other ranks.

        Raises SyncAborted if a rank does not come.
        """
        try:
            self.gather(limit)
        except DeltaSyncError:  # the call has ended
            self._send_away()
            self._call += 1
            raise
        self._is_called = True
        try:
            yield
        except BaseException as error:
            self._end_call(None, f"{type(error).__name__}: {error}")
            raise
        self._end_call(outcome(), "")

    def _end_call(self, stats: SyncStats | None, why: str) -> None:
        try:
            with suppress(SyncAborted):  # a rank that is gone finds out when it reconnects
                self.order(orders.Done(stats=stats, error=as_text(why)))
        finally:
            self._call, self._is_called = self._call + 1, False

    def gather(self, limit: CallTimeout) -> None:
        """Wait until all ranks are in the next call, unless one is under way.

        Raises SyncAborted if they do not come within `limit`, which later waits have too.
        """
        if self._is_called:
            return
        self._link.limit, wait_s = limit, limit.wait_s
        deadline = time.monotonic() + wait_s
        self._listen(0.0)
        while missing := self._missing():
            rest = deadline - time.monotonic()
            if rest <= 0:
                late = f"rank {missing[0]} of the trainer"
                raise SyncAborted(f"{late} did not come in {wait_s:.4g} s")
            self._listen(rest)
        if failed := self._link.open([self._peers[rank] for rank in range(1, self.world)]):
            self._send_away()
            why = "; ".join(map(str, failed.values()))
            raise SyncAborted(f"a rank of the trainer is gone: {why}")

    def order(self, order: orders.Order) -> orders.Order:
        """Send an order to all ranks, and return it as they get it.

        Raises SyncAborted if one is gone.
        """
        if self._is_owed:  # answers to an abandoned order
            self._link.replies()
        stamp = {"call": self._call, "version": self.version()}
        order = order.model_copy(update=stamp)
        self._is_owed = not isinstance(order, orders.Done)
        try:
            self._link.send(order)
        except TransportError as error:
            self._send_away()  # ranks that received the order would answer it
            raise SyncAborted(f"a rank of the trainer is gone: {error}") from error
        return order

    def answers(self, kind: type[A]) -> dict[int, A]:
        """Return each rank's answer. Raises SyncAborted if one failed or does not answer."""
        found: dict[int, A] = {}
        problems: list[str] = []
        replies, self._is_owed = self._link.replies(), False
        for rank, peer in self._peers.items():
            answer = replies[peer]
            if isinstance(answer, kind):
                found[rank] = answer
            elif isinstance(answer, Failed):
                problems.append(f"rank {rank}: {answer.error}: {answer.reason}")
            else:
                problems.append(f"rank {rank}: {answer}")
        if problems:
            raise SyncAborted(f"{'; '.join(problems)}; nothing is lost, send again")
        return found

    def recover(self) -> None:
        """No call is under way: an interrupt has ended it. The ranks connect again."""
        self._send_away()
        self._is_called = False

    def close(self) -> None:
        """End the connections to all ranks."""
        self._link.transport.close()

    def _missing(self) -> list[int]:
        for rank, peer in list(self._peers.items()):
            if not self._link.transport.is_connected(peer):
                del self._peers[rank]
        return [rank for rank in range(1, self.world) if rank not in self._peers]

    def _listen(self, timeout_s: float) -> None:
        for peer, here, _ in self._link.greetings(timeout_s=timeout_s):
            if isinstance(here, orders.Here) and here.world == self.world > here.rank > 0:
                self._peers[here.rank], self.captures[here.rank] = peer, here.capture
                self.addresses[here.rank], self._is_owed = here.address, False
            else:
                self._link.drop(peer)

    def _send_away(self) -> None:
        """Drop all ranks, so that they reconnect and nothing of the old exchange is left."""
        self._link.reset()
        self._peers, self._is_owed = {}, False
