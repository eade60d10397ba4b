"""The control plane of the transports that cross processes: a star of stream sockets.

The sender serves, receivers connect. A message is a fixed header (magic, kind, length), its
bytes and, with a shared secret, a MAC. No threads: whoever waits runs the sockets. What arrives
is bounded before it is kept, and bad bytes end the one connection they came on.

    client                                     server
    connect ------------------------------->   accept
            <--- NONCE (with a secret only) --
    NONCE, signed -------------------------->
    GREETING ------------------------------->  a new peer
            <------------- any other kinds -->

With a secret every message but the first is signed, so that the server hears no more than a nonce
from a client that does not know it. Losing the other process is the end of the stream, hence
noticed at once.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from deltasync.errors import (
    ConfigError,
    PeerLost,
    TransportClosed,
    TransportError,
    TransportTimeout,
)
from deltasync.transports import forks
from deltasync.transports.base import Frame

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 2 << 30
"""No receiver allocates more for a payload, whatever the sender declares; syncs send less."""
LONGEST_S = 1e6
"""The longest wait, 11 days: systems take no more than 2^31 milliseconds."""

_HEADER = struct.Struct("<2sBxI")
_MAGIC = b"dS"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4  # in flight; two segments are, at most
_INTERRUPTED = "an interrupt came while a message was on its way"
_MESSAGE_OVERHEAD_BYTES = 256
_MAX_DRAINED_BYTES = 1 << 20  # of what a connection still says when it is ended
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.00005, 0.001
_EPOLL_RESOLUTION_S = 0.001  # shorter waits would be rounded up to it


class Kind(IntEnum):
    """Kinds of control messages; numbers are never reused."""

    NONCE = 1
    GREETING = 2
    FRAME = 3
    REPLY = 4
    SEGMENT = 5
    RELEASE = 6
    GROUP = 7
    READY = 8
    START = 9
    ABANDON = 11  # 10 and 12 were in use once
    MEMORY = 13
    ROOM = 14


def deadline_in(timeout_s: float) -> float:
    """A moment of `time.monotonic`, at most `LONGEST_S` from now on. Raises ConfigError."""
    if not timeout_s <= LONGEST_S:  # nor is it NaN
        raise ConfigError(f"timeout_s is {timeout_s}: give at most {LONGEST_S:,.0f} seconds")
    return time.monotonic() + timeout_s


def left_s(deadline: float) -> float:
    """Seconds until then, never negative."""
    return max(0.0, deadline - time.monotonic())


def part_of(deadline: float, fraction: float) -> float:
    """An earlier deadline: when `fraction` of the time left has gone."""
    return time.monotonic() + fraction * left_s(deadline)


_BUSY_S = 0.002


def busy_s(device_type: str) -> float:
    """For how long whoever waits for a payload there, or for word of it, looks all the time.

    On GPUs what one end does between two words takes about as long, and waking up takes as long as
    a payload. On CPUs it would take time from those who copy.
    """
    return 0.0 if device_type == "cpu" else _BUSY_S


class Pace:
    """How long to wait between two looks at what only polling tells: ever longer."""

    def __init__(self, busy_s: float = 0.0, longest_s: float = _MAX_PAUSE_S) -> None:
        """For the first `busy_s` there is no wait at all: a sleep takes longer than it says."""
        self._busy_until = time.monotonic() + busy_s
        self._pause_s, self._longest_s = _MIN_PAUSE_S, longest_s

    def pause_s(self, deadline: float) -> float:
        """Seconds until the next look, never beyond `deadline`."""
        if time.monotonic() < self._busy_until:
            return 0.0
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._longest_s)
        return min(pause_s, left_s(deadline))


@dataclass(frozen=True, slots=True)
class Message:
    """One control message.

    Attributes:
        kind: What it is for.
        data: Its bytes; the transport gives them meaning.
        descriptor: A file descriptor that came along, owned by whoever takes the message.
    """

    kind: Kind
    data: bytes
    descriptor: int | None = None


class BrokenProtocol(PeerLost):
    """The other end sent bytes that make no sense; its connection is ended."""


def failure(errors: Mapping[int, TransportError]) -> TransportError:
    """One error that tells of all: PeerLost if any peer is lost, else TransportTimeout."""
    text = "; ".join(f"peer {peer}: {error}" for peer, error in errors.items())
    lost = any(isinstance(error, PeerLost) for error in errors.values())
    return PeerLost(text) if lost else TransportTimeout(text)


def check_frame(frame: Frame, lent: Tensor | None) -> None:
    """Raise ConfigError for a frame that no transport carries; `lent` is the last buffer."""
    most = DEFAULT_MAX_MESSAGE_BYTES // 2
    if not 0 < len(frame.header) <= most:
        raise ConfigError(f"a frame header of {len(frame.header)} bytes; 1 to {most} are carried")
    if frame.payload is not None and frame.payload is not lent:
        raise ConfigError("a payload is the tensor that `buffer` returned last")


class _Seal:
    """Signs one direction of one connection: HMAC-SHA256 under a key of that direction.

    The key is bound to both nonces and the direction, each MAC to the message's place in the
    stream, so that replayed, reordered and reflected messages fail.
    """

    def __init__(self, secret: bytes, direction: bytes, nonces: bytes) -> None:
        self._key = hmac.digest(secret, b"deltasync control 1 " + direction + nonces, "sha256")
        self._sequence = 0

    def sign(self, header: bytes, data: bytes) -> bytes:
        mac = hmac.new(self._key, struct.pack("<Q", self._sequence) + header, "sha256")
        mac.update(data)
        self._sequence += 1
        return mac.digest()


class Connection:
    """One end of one control socket. Never blocks; keeps what cannot be written yet.

    Attributes:
        lost: Why the connection has ended, or None. What arrived before can still be taken.
        peer: Its number at a server; None before it has greeted.
        local_host: The address by which the other end reaches this machine; empty without TCP.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        is_server: bool,
        kinds: Collection[Kind],
        max_message_bytes: int,
        secret: bytes | None = None,
    ) -> None:
        sock.setblocking(False)
        self.local_host = ""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.local_host = str(sock.getsockname()[0])
        self.lost: PeerLost | None = None
        self.peer: int | None = None
        self._socket = sock
        self._is_server = is_server
        self.allow(kinds, max_message_bytes)
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES)
        self._signs: _Seal | None = None
        self._checks: _Seal | None = None
        self._arrived = bytearray()
        self._descriptors: deque[int] = deque()
        self._inbox: deque[Message] = deque()
        self._inbox_bytes = 0
        self._outbox: deque[tuple[memoryview, int | None]] = deque()
        forks.inert_in_children(self._forked)
        if secret is not None and is_server:
            self.write(Kind.NONCE, self._nonce)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_part_bytes(self) -> int:
        """Bytes of a message of which not all has arrived.

        With a secret, of one from somebody who knows it: a nonce takes none worth a count.
        """
        return 0 if self._wants_nonce else len(self._arrived)

    @property
    def _wants_nonce(self) -> bool:
        return self._secret is not None and self._checks is None

    @property
    def is_writing(self) -> bool:
        """Whether messages wait for the other end to read."""
        return bool(self._outbox)

    @property
    def can_write(self) -> bool:
        """Whether messages may be written: with a secret, once both nonces are known."""
        return self._secret is None or self._signs is not None

    def allow(self, kinds: Collection[Kind], max_message_bytes: int) -> None:
        """What may arrive from now on. As much as two messages may wait to be taken."""
        self._kinds, self._limit = frozenset(kinds), max_message_bytes

    def write(self, kind: Kind, data: bytes, descriptor: int | None = None) -> None:
        """Queue a message and write what the socket takes. `descriptor` stays the caller's."""
        if self.lost is not None:
            return
        header = _HEADER.pack(_MAGIC, kind, len(data))
        try:
            mac = self._signs.sign(header, data) if self._signs else b""
            self._outbox.append((memoryview(header + data + mac), descriptor))
        except BaseException:  # a signature that is not sent makes the later ones wrong
            self._end(PeerLost(_INTERRUPTED))
            raise
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes.

        An interrupt ends the connection: how much of a message went out is not known any more, and
        the other end must not get it twice, or half of it.
        """
        while self._outbox and self.lost is None:
            try:
                self._write_next()
            except BlockingIOError:
                return
            except OSError as error:
                # What the other end said before it went can still be read.
                self.read()
                self._end(PeerLost(f"the connection broke: {error.strerror}"))
                return
            except BaseException:
                self._end(PeerLost(_INTERRUPTED))
                raise

    def read(self) -> None:
        """Take in what has arrived. An interrupt ends the connection, as in `flush`."""
        if self.lost is not None:
            return
        try:
            data = self._read_some()
            if data:
                self._arrived += data
                self._split()
            else:
                self._end(PeerLost("the other end closed the connection"))
        except BlockingIOError:
            return
        except BrokenProtocol as error:
            self._end(error)
        except OSError as error:
            self._end(PeerLost(f"the connection broke: {error.strerror}"))
        except BaseException:
            self._end(PeerLost(_INTERRUPTED))
            raise

    def take(self, kind: Kind | None = None) -> Message | None:
        """The oldest message (of `kind`) that has arrived, or None."""
        for index, message in enumerate(self._inbox):
            if kind is None or message.kind is kind:
                del self._inbox[index]
                self._inbox_bytes -= len(message.data) + _MESSAGE_OVERHEAD_BYTES
                return message
        return None

    def hang_up(self, reason: PeerLost | None = None) -> None:
        """End the connection; what has arrived can still be taken. Idempotent.

        What was written before still reaches the other end.
        """
        if self.lost is None:
            # Bytes left unread would turn the end of a TCP stream into a reset, which
            # discards what the other end has not read yet.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                for _ in range(_MAX_DRAINED_BYTES // _READ_BYTES):
                    if not self._socket.recv(_READ_BYTES):
                        break
        self._end(reason or PeerLost("this end closed the connection"))
        self._socket.close()

    def close(self) -> None:
        """Hang up and forget what has arrived. Idempotent."""
        self.hang_up()
        while message := self.take():
            if message.descriptor is not None:
                os.close(message.descriptor)
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _forked(self) -> None:
        """Give descriptors up, and leave the connection to the parent."""
        self._end(PeerLost(forks.PARENTS_OWN))
        self.close()

    def _end(self, reason: PeerLost) -> None:
        if self.lost is None:
            self.lost = reason
            self._outbox.clear()
            self._arrived.clear()

    def _write_next(self) -> None:
        """Write what the socket takes of the oldest message. Raises OSError."""
        view, descriptor = self._outbox[0]
        if descriptor is None:
            written = self._socket.send(view)
        else:
            written = socket.send_fds(self._socket, [view], [descriptor])
        if written == len(view):
            self._outbox.popleft()
        else:
            self._outbox[0] = view[written:], None

    def _read_some(self) -> bytes:
        if Kind.SEGMENT not in self._kinds:
            return self._socket.recv(_READ_BYTES)
        with forks.making:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
            self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > _MAX_DESCRIPTORS:
            raise BrokenProtocol("more file descriptors than messages that announce one")
        return data

    def _split(self) -> None:
        """Move whole messages from the bytes that arrived to the inbox."""
        start = 0
        while len(self._arrived) - start >= _HEADER.size:
            kind, length = self._parse(start)
            # The first message of a server is the only one that is not signed.
            is_signed = self._checks or (self._wants_nonce and self._is_server)
            mac_bytes = _MAC_BYTES if is_signed else 0
            body = start + _HEADER.size
            end = body + length + mac_bytes
            if len(self._arrived) < end:
                break
            data = bytes(memoryview(self._arrived)[body : body + length])
            if self._wants_nonce:
                self._exchange_nonces(data)
            if is_signed:
                self._check(start, body + length, data)
            if kind is not Kind.NONCE:
                self._accept(kind, data)
            start = end
        del self._arrived[:start]

    def _parse(self, start: int) -> tuple[Kind, int]:
        """The kind and length in the header at `start`, both within what is allowed."""
        magic, number, length = _HEADER.unpack_from(self._arrived, start)
        allowed = frozenset({Kind.NONCE}) if self._wants_nonce else self._kinds
        if magic != _MAGIC or number not in allowed:
            raise BrokenProtocol("the other end sent what is no deltasync message")
        if length > (_NONCE_BYTES if self._wants_nonce else self._limit):
            raise BrokenProtocol(f"a message of {length} bytes is over the limit")
        return Kind(number), length

    def _check(self, start: int, end: int, data: bytes) -> None:
        assert self._checks is not None
        header = bytes(self._arrived[start : start + _HEADER.size])
        mac = bytes(self._arrived[end : end + _MAC_BYTES])
        if not hmac.compare_digest(mac, self._checks.sign(header, data)):
            raise BrokenProtocol("a message was not signed with the shared secret")

    def _accept(self, kind: Kind, data: bytes) -> None:
        if kind is Kind.GREETING and self._inbox:
            raise BrokenProtocol("two greetings on one connection")
        self._inbox_bytes += len(data) + _MESSAGE_OVERHEAD_BYTES
        if self._inbox_bytes > 2 * self._limit:
            raise BrokenProtocol("more messages than this end takes")
        descriptor = None
        if kind is Kind.SEGMENT:
            if not self._descriptors:
                raise BrokenProtocol("a segment came without its file descriptor")
            descriptor = self._descriptors.popleft()
        self._inbox.append(Message(kind, data, descriptor))

    def _exchange_nonces(self, other: bytes) -> None:
        if self._secret is None or len(other) != _NONCE_BYTES:
            raise BrokenProtocol("a nonce of the wrong size")
        server, client = (self._nonce, other) if self._is_server else (other, self._nonce)
        down = _Seal(self._secret, b"to client", client + server)
        up = _Seal(self._secret, b"to server", client + server)
        self._signs, self._checks = (down, up) if self._is_server else (up, down)
        if not self._is_server:
            self.write(Kind.NONCE, self._nonce)


class Gate:
    """Lets one thread at a time use an end, and `close` from any thread wake it."""

    def __init__(self, busy_s: float = 0.0) -> None:
        """Every wait begins with `busy_s` of looking again and again: waking up takes time."""
        self._busy_s = busy_s
        self._lock = threading.RLock()
        self._closed = ""  # why it is
        with forks.making:
            self._alarm, self._bell = map(forks.closed_in_children, socket.socketpair())
        # Looked up for each message of each peer: the selector takes several times as long.
        self._watched: dict[Connection | socket.socket, int] = {}
        self._watch_anew()
        forks.inert_in_children(self._forked)

    def _watch_anew(self) -> None:
        with forks.making:
            self._selector = forks.closed_in_children(selectors.DefaultSelector())
        self._selector.register(self._alarm, selectors.EVENT_READ)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Held during every public call. Raises TransportClosed after `close`."""
        with self._lock:
            self.check()
            yield

    def check(self) -> None:
        """Raise TransportClosed after `close`."""
        if self._closed:
            raise TransportClosed(self._closed)

    def wait(self, timeout_s: float) -> list[object]:
        """The watched things that became ready, at most after `timeout_s`."""
        self.check()
        if 0 < timeout_s < _EPOLL_RESOLUTION_S:
            time.sleep(timeout_s)
            timeout_s = 0
        now, events = time.monotonic(), list[tuple[selectors.SelectorKey, int]]()
        deadline, busy_until = now + timeout_s, now + min(self._busy_s, timeout_s)
        while not events and time.monotonic() < busy_until:
            events = self._selector.select(0)
        if not events:
            events = self._selector.select(max(0.0, deadline - time.monotonic()))
        self.check()
        return [key.fileobj for key, _ in events]

    def watch(self, source: Connection | socket.socket) -> None:
        """Wake when `source` can be read, or written to if something waits to be."""
        events = selectors.EVENT_READ
        if isinstance(source, Connection) and source.is_writing:
            events |= selectors.EVENT_WRITE
        if self._watched.get(source) == events:
            return
        try:
            self._selector.modify(source, events)
        except KeyError:
            self._selector.register(source, events)
        self._watched[source] = events

    def forget(self, source: Connection | socket.socket) -> None:
        """Stop waking for `source`; must be called before it is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)
        self._watched.pop(source, None)

    def reset(self, listener: socket.socket) -> None:
        """Close all that is watched but the listener, also what an interrupt has left to nobody."""
        self._selector.close()  # which no longer has what the system has, if it was interrupted
        for source in self._watched:
            if source is not listener:
                source.close()
        self._watched.clear()
        self._watch_anew()
        self.watch(listener)

    def close(self, dispose: Callable[[], None]) -> None:
        """Wake the call in progress, wait until it has left, then `dispose`, once.

        In a forked child there is nothing to dispose of.
        """
        self._closed = self._closed or "this end of the transport was closed"
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        with self._lock:
            if self._alarm.fileno() == -1:
                return
            dispose()
            self._selector.close()
            self._alarm.close()
            self._bell.close()

    def _forked(self) -> None:
        self._lock = threading.RLock()
        self._closed = f"this end of the transport cannot be used: {forks.PARENTS_OWN}"
