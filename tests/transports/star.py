"""The control plane alone: a sender on a free TCP port, and all who connect to it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import torch
from torch import Tensor

from deltasync.errors import TransportError
from deltasync.testing.links import PATIENCE_S, PROMPT_S, background
from deltasync.transports.base import Frame
from deltasync.transports.control.connection import Kind, Message, deadline_in
from deltasync.transports.sockets import Arrival, SocketReceiver, SocketSender

HEADER = struct.Struct("<2sBxI")
SECRET = b"shared"
CPU = torch.device("cpu")


def message(kind: int, data: bytes, *, magic: bytes = b"dS", length: int | None = None) -> bytes:
    return HEADER.pack(magic, kind, len(data) if length is None else length) + data


GREETING = message(Kind.GREETING, b"hello")


class Server(SocketSender):
    """Of frames without payloads."""

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        raise NotImplementedError

    def _send_payload(
        self, header: bytes, payload: Tensor, deadline: float
    ) -> dict[int, TransportError]:
        raise NotImplementedError


class Client(SocketReceiver[Arrival]):
    """Of such frames."""

    def __init__(self, address: tuple[str, int], secret: bytes | None) -> None:
        super().__init__(CPU, {Kind.FRAME}, secret=secret)
        self._address = address

    def _dial(self, timeout_s: float) -> socket.socket:
        return socket.create_connection(self._address, timeout_s)

    def _take_back(self) -> None:
        """There is nothing."""

    def _advance(self) -> bool:
        return False

    def _obey(self, message: Message) -> None:
        self._expect(Arrival(message.data))

    def _hand_out(self, first: Arrival) -> Frame:
        self._waiting.popleft()
        return Frame(first.header)


class Star:
    """The server, its clients, and raw sockets that pretend to be some."""

    def __init__(
        self,
        stack: ExitStack,
        secret: bytes | None = None,
        *,
        greeting_timeout_s: float = PATIENCE_S,
    ) -> None:
        self._stack = stack
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = listener.getsockname()
        self.server = Server(
            listener, CPU, Kind.READY, secret=secret, greeting_timeout_s=greeting_timeout_s
        )
        stack.callback(self.server.close)
        self.is_over = threading.Event()
        stack.callback(self.is_over.set)

    def raw(self, said: bytes = b"") -> socket.socket:
        sock = self._stack.enter_context(socket.create_connection(self.address, PATIENCE_S))
        sock.sendall(said)
        return sock

    def peer(self) -> tuple[int, socket.socket]:
        """One that has greeted, and says the rest by hand."""
        sock = self.raw(GREETING)
        ((peer, _),) = self.server.poll(timeout_s=PATIENCE_S)
        return peer, sock

    def client(self, secret: bytes | None = None) -> Client:
        return self._stack.enter_context(Client(self.address, secret))

    def welcome(self, client: Client, *, timeout_s: float = PATIENCE_S) -> int:
        """Let an honest client in, by polls that do not wait, as a sync's do."""
        connected = background(lambda: client.connect(b"honest", timeout_s=timeout_s))
        give_up = deadline_in(timeout_s)
        while time.monotonic() < give_up:
            for peer, greeting in self.server.poll(timeout_s=0):
                if greeting == b"honest":
                    connected.result(PATIENCE_S)
                    return peer
        raise AssertionError("an honest receiver was not let in")

    def assert_serves(self, client: Client, peer: int) -> None:
        assert self.server.open_epoch([peer], timeout_s=PATIENCE_S) == {}
        self.server.send(Frame(b"question"), timeout_s=PATIENCE_S)
        assert client.receive(timeout_s=PATIENCE_S).header == b"question"
        client.reply(b"answer", timeout_s=PATIENCE_S)
        assert self.server.collect_replies(timeout_s=PATIENCE_S) == {peer: b"answer"}

    def attack(self, act: Callable[[socket.socket], object]) -> None:
        """Connect and `act`, again and again in another thread."""

        def run() -> None:
            while not self.is_over.is_set():
                with suppress(OSError), socket.create_connection(self.address, 5) as sock:
                    sock.settimeout(5)
                    while not self.is_over.is_set():
                        act(sock)

        thread = threading.Thread(target=run)
        thread.start()
        self._stack.callback(thread.join, PATIENCE_S)
        self._stack.callback(self.is_over.set)

    def until_lost(self, peer: int) -> bool:
        """Wait until a peer is lost; whether it was, in a short time."""
        give_up = deadline_in(PROMPT_S)
        while self.server.is_connected(peer) and time.monotonic() < give_up:
            self.server.poll(timeout_s=0.1)
        return not self.server.is_connected(peer)

    def turns_away(self, stranger: socket.socket) -> bool:
        """Poll, and hear nobody, until a stranger is turned away; whether it was, in short."""
        give_up = deadline_in(PROMPT_S)
        while time.monotonic() < give_up:
            assert self.server.poll(timeout_s=0.05) == []
            if is_closed(stranger, timeout_s=0.01):
                return True
        return False


@pytest.fixture
def make_star() -> Iterator[Callable[..., Star]]:
    with ExitStack() as stack:
        yield lambda secret=None, **options: Star(stack, secret, **options)


def is_closed(sock: socket.socket, *, timeout_s: float = PROMPT_S) -> bool:
    """Whether the other end closes the connection within a short time, whatever it says first."""
    sock.settimeout(timeout_s)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
