"""The shared memory transport keeps the contract, and leaves nothing behind."""

import fcntl
import gc
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest

from deltasync.errors import ConfigError, PeerLost, TransportTimeout
from deltasync.testing.links import (
    PATIENCE_S,
    PROMPT_S,
    Ends,
    Link,
    greeted,
    payload_of,
    same_frame,
    send_for_ever,
    within,
)
from deltasync.testing.processes import Child
from deltasync.testing.transport import TransportContract
from deltasync.transports.base import Frame
from deltasync.transports.control.connection import Connection, Kind
from deltasync.transports.shared_memory import Receiver, Sender


class TestSharedMemory(TransportContract):
    def ends(self, tmp_path: Path, max_payload_bytes: int) -> Ends:
        path = tmp_path / "socket"
        sender = partial(Sender, path, max_payload_bytes=max_payload_bytes)
        return Ends(sender, partial(Receiver, path), crosses_processes=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def link(path: Path) -> Iterator[Link]:
    with ExitStack() as stack:
        yield Link(Ends(partial(Sender, path), partial(Receiver, path), True), stack)


def num_segments() -> int:
    """Descriptors of shared memory that this process holds."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return count


# The socket file


def listen_until_killed(path: Path) -> None:
    Sender(path).poll(timeout_s=60)


def test_only_the_user_may_connect(path: Path) -> None:
    with closing(Sender(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


@pytest.mark.timeout(60)
def test_the_socket_file_of_a_killed_sender_is_replaced(path: Path) -> None:
    with Child(listen_until_killed, path) as child, closing(Receiver(path)) as receiver:
        receiver.connect(b"hello", timeout_s=PATIENCE_S)
        child.kill()
        assert path.exists()
        with closing(Sender(path)) as sender:
            receiver.connect(b"hello again", timeout_s=PATIENCE_S)
            assert [data for _, data in sender.poll(timeout_s=PATIENCE_S)] == [b"hello again"]
    assert list(path.parent.iterdir()) == []


def test_the_socket_file_of_a_live_sender_is_left_alone(path: Path) -> None:
    with closing(Sender(path)) as sender, closing(Receiver(path)) as receiver:
        with pytest.raises(ConfigError, match="another sender"):
            Sender(path)
        receiver.connect(b"hello", timeout_s=PATIENCE_S)
        # The probe of the second sender came and went: it is no peer.
        assert [data for _, data in sender.poll(timeout_s=PATIENCE_S)] == [b"hello"]


def test_closing_leaves_the_socket_file_of_a_successor(path: Path) -> None:
    with closing(Sender(path)) as sender:
        path.unlink()
        with closing(Sender(path)):
            sender.close()
            assert path.exists()


def test_nothing_but_a_stale_socket_is_removed(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        Sender(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["missing/socket", "long" * 50])
def test_paths_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        Sender(tmp_path / name)


# Slots


@pytest.mark.timeout(60)
def test_the_buffer_is_what_receivers_read(link: Link) -> None:
    link.add(2)
    link.open()
    buffer = link.sender.buffer(1000, timeout_s=1)
    address = buffer.data_ptr()
    first, second = link.exchange(Frame(b"x", buffer.fill_(1)))
    assert first.payload is not None
    assert second.payload is not None
    buffer.fill_(2)  # against the rules, to see that the memory is one
    assert int(first.payload[0]) == int(second.payload[999]) == 2
    first.payload.fill_(3)  # against the rules too: harms nobody else
    assert int(second.payload[0]) == int(buffer[0]) == 2
    link.exchange(Frame(b"x", link.sender.buffer(1000, timeout_s=1)))
    link.exchange(Frame(b"header only"))
    assert link.sender.buffer(1000, timeout_s=1).data_ptr() == address


@pytest.mark.timeout(60)
def test_slots_are_passed_once_and_grow(link: Link) -> None:
    link.add(2)
    link.open()
    for _ in range(2):  # into both slots, since nobody reads meanwhile
        link.sender.send(Frame(b"x", payload_of(10)), timeout_s=1)
    for receiver in link.receivers * 2:
        receiver.receive(timeout_s=PATIENCE_S)
    gc.collect()
    before = num_segments()
    for num_bytes in [10, 100, 1, 60_000] * 5:
        frame = Frame(b"x", payload_of(num_bytes))
        assert all(same_frame(got, frame) for got in link.exchange(frame))
    assert num_segments() == before
    for num_bytes in (1 << 20, 3 << 20, 2 << 20, 5 << 20):
        frame = Frame(b"x", payload_of(num_bytes))
        assert all(same_frame(got, frame) for got in link.exchange(frame))
    del frame
    gc.collect()
    assert num_segments() == before


@pytest.mark.timeout(60)
def test_any_part_of_the_buffer_may_be_sent(link: Link) -> None:
    link.add(1)
    link.open()
    for part in (slice(0, 10), slice(5, 15)):
        buffer = link.sender.buffer(100, timeout_s=1)
        buffer.copy_(payload_of(100))
        assert same_frame(
            link.exchange(Frame(b"x", buffer[part]))[0], Frame(b"x", payload_of(100)[part])
        )


@pytest.mark.timeout(60)
def test_who_holds_a_payload_for_ever_is_dropped(link: Link) -> None:
    link.add(1)
    good = link.add_echo()
    holder = link.peers[0]
    assert link.sender.open_epoch([holder, good], timeout_s=1) == {}
    link.sender.send(Frame(b"hold this", payload_of(100)), timeout_s=1)
    assert link.receivers[0].receive(timeout_s=PATIENCE_S).header == b"hold this"
    link.sender.send(Frame(b"and this", payload_of(100)), timeout_s=1)
    with within(PROMPT_S), pytest.raises(TransportTimeout):
        link.sender.buffer(100, timeout_s=0.2)
    assert not link.sender.is_connected(holder)
    link.check([good])


@pytest.mark.timeout(60)
def test_what_was_sent_before_a_drop_arrives_although_a_payload_is_held(link: Link) -> None:
    link.add(1)
    link.open()
    link.exchange(Frame(b"x", payload_of(100)))
    link.sender.send(Frame(b"last words"), timeout_s=1)
    link.sender.drop(link.peers[0])
    assert link.receivers[0].receive(timeout_s=PROMPT_S).header == b"last words"


@pytest.mark.timeout(60)
def test_a_receiver_that_leaves_lets_go(link: Link) -> None:
    link.add(2)
    link.open()
    for _ in range(2):
        link.exchange(Frame(b"x", payload_of(100)))
    link.receivers[0].close()
    link.receivers[1].close()
    with within(PROMPT_S):
        link.sender.buffer(100, timeout_s=PATIENCE_S)


@pytest.mark.timeout(60)
def test_a_receiver_that_does_not_read_is_late(link: Link) -> None:
    link.add(1)
    assert link.sender.open_epoch(link.peers, timeout_s=1) == {}
    frame = Frame(bytes(1 << 20))
    with within(2 * PROMPT_S), pytest.raises(TransportTimeout):
        send_for_ever(link, frame, timeout_s=0.3)
    assert not link.sender.is_connected(link.peers[0])


# Peers that lie

FRAME = struct.Struct("<BxxxIQQ")
SEGMENT = struct.Struct("<BxxxxxxxQ")


@pytest.mark.parametrize("data", [b"", bytes(8), b"\x01" * 8, bytes(9)])
def test_letting_go_of_nothing_ends_the_connection(link: Link, path: Path, data: bytes) -> None:
    good = link.add_echo()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        liar = Connection(sock, is_server=False, kinds=set(Kind), max_message_bytes=1 << 20)
        liar.write(Kind.GREETING, b"")
        (peer,) = greeted(link.sender, 1)
        assert link.sender.open_epoch([peer, good], timeout_s=1) == {}
        link.sender.send(Frame(b"x", payload_of(10)), timeout_s=1)
        link.sender.send(Frame(b"x", payload_of(10)), timeout_s=1)
        liar.write(Kind.RELEASE, data)
        with within(PROMPT_S):
            link.sender.buffer(10, timeout_s=PATIENCE_S)
        assert not link.sender.is_connected(peer)
        liar.close()
    link.check([good])


def memory(size: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("segment", "size", "seals", "frame"),
    [
        (SEGMENT.pack(0, 4096), 4096, 0, b""),
        (SEGMENT.pack(0, 4096), 4096, fcntl.F_SEAL_GROW, b""),
        (SEGMENT.pack(0, 8192), 4096, SEALS, b""),
        (SEGMENT.pack(0, 0), 0, SEALS, b""),
        (SEGMENT.pack(0, 1 << 40), 1 << 40, SEALS, b""),
        (SEGMENT.pack(2, 4096), 4096, SEALS, b""),
        (b"short", 4096, SEALS, b""),
        (SEGMENT.pack(0, 4096), 4096, SEALS, FRAME.pack(0, 1, 0, 4097) + b"header"),
        (SEGMENT.pack(0, 4096), 4096, SEALS, FRAME.pack(0, 1, 4090, 10) + b"header"),
        (SEGMENT.pack(0, 4096), 4096, SEALS, FRAME.pack(0, 1, 1 << 63, 1 << 63) + b"header"),
        (SEGMENT.pack(0, 4096), 4096, SEALS, FRAME.pack(1, 1, 0, 10) + b"header"),
        (SEGMENT.pack(0, 4096), 4096, SEALS, FRAME.pack(0, 1, 0, 10)),
        (SEGMENT.pack(0, 4096), 4096, SEALS, b"short"),
    ],
)
def test_a_sender_that_lies_is_lost(
    path: Path, segment: bytes, size: int, seals: int, frame: bytes
) -> None:
    gc.collect()
    before = num_segments()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with closing(Receiver(path, max_payload_bytes=1 << 20)) as receiver:
            receiver.connect(b"", timeout_s=PATIENCE_S)
            sock, _ = listener.accept()
            liar = Connection(sock, is_server=True, kinds=set(Kind), max_message_bytes=1 << 20)
            descriptor = memory(size, seals)
            liar.write(Kind.SEGMENT, segment, descriptor)
            os.close(descriptor)
            liar.write(Kind.FRAME, frame)
            with pytest.raises(PeerLost):
                receiver.receive(timeout_s=PATIENCE_S)
            liar.close()
    gc.collect()
    assert num_segments() == before
