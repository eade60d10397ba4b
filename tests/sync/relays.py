"""Relays in threads of one process, over the in-process transport."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from deltasync.errors import TransportClosed
from deltasync.sync.relay.relay import Relay
from deltasync.sync.stats import SyncStats
from deltasync.transports import inprocess
from deltasync.transports.base import ReceiveTransport
from tests.sync.harness import Receivers, until


class Region(Receivers):
    """A relay that forwards in a thread, and the receivers below it."""

    def __init__(
        self, upstream: ReceiveTransport, *lanes: ReceiveTransport, **options: Any
    ) -> None:
        link = inprocess.Sender()
        super().__init__([link])
        self.relay = Relay(upstream, link, lanes=lanes, **options)
        self.sender = self.relay._sender
        self._sent: list[SyncStats] = []
        self._calls = 0
        self.crash: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> list[SyncStats]:
        """What was forwarded, with what is being forwarded: receivers have it before it returns."""
        calls = self._calls
        until(lambda: self._calls > calls)
        return self._sent

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the relay hangs"
        self.relay.close()
        super().close()
        if self.crash is not None:
            raise self.crash

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                stats = self.relay.forward(timeout_s=0.1)
                if stats is not None:
                    self._sent.append(stats)
                self._calls += 1
        except TransportClosed:
            return
        except BaseException as error:
            self.crash = error
            raise


@contextlib.contextmanager
def region(
    upstream: ReceiveTransport, *lanes: ReceiveTransport, **options: Any
) -> Iterator[Region]:
    made = Region(upstream, *lanes, **options)
    try:
        yield made
    finally:
        made.close()
