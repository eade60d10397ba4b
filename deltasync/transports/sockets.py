"""What transports over the control plane have in common, less how payloads move."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from deltasync.errors import TransportClosed, TransportError
from deltasync.transports.base import ReceiveTransport, SendTransport
from deltasync.transports.control.connection import Gate, Kind, busy_s, deadline_in, failure
from deltasync.transports.control.endpoints import Client, Server


class SocketSender(SendTransport, ABC):
    """The sender's end."""

    def __init__(
        self,
        listener: socket.socket,
        device: torch.device,
        kind: Kind,
        *,
        secret: bytes | None = None,
        admit: Callable[[socket.socket], None] = lambda sock: None,
    ) -> None:
        """Serve on `listener`. Peers send replies and `kind`; `secret` and `admit` as `Server`."""
        self.device = device
        self._busy_s = busy_s(device.type)
        self._gate = Gate(self._busy_s)
        self._server = Server(
            listener, self._gate, kinds={Kind.REPLY, kind}, secret=secret, admit=admit
        )
        self._epoch: tuple[int, ...] = ()
        self._members: set[int] = set()
        self._buffer: Tensor | None = None  # that was returned last, and is not sent

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._gate.entered():
            return self._server.poll(deadline_in(timeout_s))

    def is_connected(self, peer: int) -> bool:
        with self._gate.entered():
            return self._server.is_connected(peer)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._post_header(peers, header)
            self._check(self._server.flush(peers, deadline_in(timeout_s)))

    def some_replies(
        self, peers: Collection[int], *, timeout_s: float
    ) -> dict[int, bytes | TransportError]:
        with self._gate.entered():
            return self._checked(self._server.some(peers, Kind.REPLY, deadline_in(timeout_s)))

    def reset(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._server.reset()

    def close(self) -> None:
        self._gate.close(self._dispose)

    @abstractmethod
    def _post_header(self, peers: Collection[int], header: bytes) -> None:
        """Write a frame without a payload."""

    @abstractmethod
    def _dispose(self) -> None:
        """Close everything, once."""

    def _remove(self, peers: Iterable[int]) -> None:
        """These are members no more."""
        self._members.difference_update(peers)

    def _check(self, failures: Mapping[int, TransportError]) -> None:
        """Remove the peers that failed, and raise what they failed with."""
        self._remove(failures)
        if failures:
            raise failure(failures)

    def _checked(
        self, replies: dict[int, bytes | TransportError]
    ) -> dict[int, bytes | TransportError]:
        """The same; those that have none are removed."""
        self._remove(peer for peer, reply in replies.items() if not isinstance(reply, bytes))
        return replies


class SocketReceiver(ReceiveTransport, ABC):
    """A receiver's end."""

    def __init__(
        self, device: torch.device, kinds: Collection[Kind], *, secret: bytes | None = None
    ) -> None:
        """The sender sends `kinds`."""
        self.device = device
        self._busy_s = busy_s(device.type)
        self._gate = Gate(self._busy_s)
        self._client = Client(self._dial, self._gate, kinds=kinds, secret=secret)

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """With a secret, waits for the sender to poll."""
        with self._gate.entered():
            self._forget()
            self._client.connect(greeting, deadline_in(timeout_s))

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._client.write(Kind.REPLY, data, deadline_in(timeout_s))

    def disconnect(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._forget()

    def close(self) -> None:
        self._gate.close(self._forget)

    @abstractmethod
    def _dial(self, timeout_s: float) -> socket.socket:
        """A connection to the sender. Raises OSError while nobody serves, in so many seconds."""

    @abstractmethod
    def _forget(self) -> None:
        """End the connection, and expect no frame."""
