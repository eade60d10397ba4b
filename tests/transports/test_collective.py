"""The collective transport keeps the contract over gloo, and its own promises."""

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltasync.errors import ConfigError, PeerLost, TransportTimeout, TransportUnavailable
from deltasync.testing.links import (
    PATIENCE_S,
    PROMPT_S,
    Ends,
    Link,
    answer_frames,
    answer_to,
    background,
    echo,
    greeted,
    payload_of,
    same_frame,
    send_copy,
    within,
)
from deltasync.testing.processes import Child
from deltasync.testing.transport import TransportContract
from deltasync.transports import collective, collective_receiver
from deltasync.transports.base import Frame
from deltasync.transports.collective import Receiver, Sender
from deltasync.transports.control.connection import BrokenProtocol, Connection, Kind, Message
from deltasync.transports.process_group import Broadcast, Join, serve_store
from tests.worlds.programs import run
from tests.worlds.ranks import free_port, free_ports


def ends(secret: bytes | None = None) -> Ends:
    port = free_port()
    sender = partial(Sender, "127.0.0.1", port, secret=secret)
    return Ends(sender, partial(Receiver, "127.0.0.1", port, secret=secret), True)


class TestGloo(TransportContract):
    def ends(self, tmp_path: Path) -> Ends:
        return ends()


@pytest.fixture
def link() -> Iterator[Link]:
    with ExitStack() as stack:
        yield Link(ends(), stack)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "The default process group is neither used nor created.",
)
@pytest.mark.parametrize("secret", [None, b"shared"], ids=["plain", "signed"])
def test_the_default_group_is_neither_used_nor_made(secret: bytes | None) -> None:
    with ExitStack() as stack:
        link = Link(ends(secret), stack)
        link.add(2)
        link.open()
        frame = Frame(b"x", payload_of(1000))
        assert all(same_frame(got, frame) for got in link.exchange(frame))
        assert not dist.is_initialized()


def test_the_epoch_may_shrink_and_grow(link: Link) -> None:
    echoes = [link.add_echo() for _ in range(3)]
    for peers in (echoes[:1], echoes, echoes[1:], echoes[:2]):
        link.check(peers)


def test_a_payload_that_a_receiver_is_late_for_reaches_nobody(link: Link) -> None:
    link.add(2)
    link.open()
    received = background(lambda: link.receivers[0].receive(timeout_s=PATIENCE_S))
    with within(PROMPT_S), pytest.raises(TransportTimeout):
        link.send(Frame(b"half", payload_of(1000)), timeout_s=1.5)
    assert [link.sender.is_connected(peer) for peer in link.peers] == [True, False]
    # The survivor waits on, and the next payload forms a new group by itself.
    frame = Frame(b"whole", payload_of(1000))
    link.send(frame)
    assert same_frame(received.result(PATIENCE_S), frame)


def test_one_that_starts_a_payload_late_is_dropped_alone(link: Link) -> None:
    """It is back before all of the timeout has passed, and then everybody answers."""
    timeout_s, slow = 15.0, link.receiver()
    assert isinstance(slow, Receiver)
    on_start, is_slow = slow._on_start, threading.Event()

    def start(data: bytes) -> None:
        if is_slow.is_set():
            time.sleep(0.755 * timeout_s)
        on_start(data)

    slow._on_start = start  # type: ignore[method-assign]
    background(lambda: echo(slow, b"slow"))
    peers = [*greeted(link.sender, 1), link.add_echo(), link.add_echo()]
    link.check(peers)
    is_slow.set()
    link.send(Frame(b"x", payload_of(4 << 20)), timeout_s=timeout_s)
    link.sender.send(Frame(b"who is here?"), timeout_s=timeout_s)
    replies = link.sender.collect_replies(timeout_s=timeout_s)
    assert isinstance(replies[peers[0]], TransportTimeout)
    assert [link.sender.is_connected(peer) for peer in peers] == [False, True, True]
    link.check(peers[1:])


def stop_while_receiving(make: Callable[[], Receiver]) -> None:
    receiver = make()
    receiver.connect(b"hello", timeout_s=PATIENCE_S)
    receiver.receive(timeout_s=PATIENCE_S)
    threading.Timer(0.1, partial(os.kill, os.getpid(), signal.SIGSTOP)).start()
    answer_frames(receiver)


# A script of its own: processes of multiprocessing end without finalizing the interpreter.
SEND_UNTIL_LATE = """
import sys, time
import torch
from deltasync.errors import TransportTimeout
from deltasync.testing.links import greeted, send_copy
from deltasync.transports.base import Frame
from deltasync.transports.collective import Sender

sender = Sender("127.0.0.1", int(sys.argv[1]))
assert sender.open_epoch(list(greeted(sender, 1)), timeout_s=60) == {}
frame = Frame(b"x", torch.zeros(64 << 20, dtype=torch.uint8))
send_copy(sender, frame)
try:
    while True:
        send_copy(sender, frame, timeout_s=1)
except TransportTimeout:
    pass

class SlowExit:
    # Keeps the interpreter busy with its own end while the back end gives up.
    def __del__(self, sleep=time.sleep):
        sleep(2.5)

slow_exit = SlowExit()
"""


def test_a_process_that_left_a_stuck_group_exits_well() -> None:
    port = free_port()
    with Child(stop_while_receiving, partial(Receiver, "127.0.0.1", port)):
        done = run(SEND_UNTIL_LATE, str(port))
    assert done.returncode == 0, done.stderr


def test_receivers_refuse_payloads_beyond_their_limit(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_receiver, "MAX_PAYLOAD_BYTES", 99)
    link.add(1)
    link.open()
    received = link.receive_later()
    with pytest.raises(PeerLost):
        link.send(Frame(b"x", payload_of(100)))
    assert isinstance(received[0].exception(PATIENCE_S), PeerLost)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Kind.FRAME, b""),
        (Kind.ROOM, b"short"),
        (Kind.ROOM, struct.pack("<QI", 1, 1)),
        (Kind.ROOM, struct.pack("<QQ", 1, 0)),
        (Kind.ROOM, struct.pack("<QQ", 1, 1 << 62)),
        (Kind.GROUP, b"short"),
        (Kind.GROUP, struct.pack("<QIIHxd", 1, 2, 2, 1, 1.0) + b"gloo name"),
        (Kind.GROUP, struct.pack("<QIIHxd", 1, 1, 2, 1, 1.0) + b"gloo"),
        (Kind.START, b"short"),
        (Kind.START, bytes(8)),
        (Kind.START, struct.pack("<QQd", 1, 10, 1.0) + b"header"),
        (Kind.ABANDON, b"short"),
    ],
)
def test_a_sender_that_lies_is_lost(
    liar: tuple[Connection, Receiver], kind: Kind, data: bytes
) -> None:
    liar[0].write(kind, data)
    with pytest.raises(PeerLost):
        liar[1].receive(timeout_s=PATIENCE_S)


@pytest.fixture
def liar() -> Iterator[tuple[Connection, Receiver]]:
    """A sender by hand, and the receiver that has greeted it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Receiver(*listener.getsockname())) as receiver,
    ):
        receiver.connect(b"", timeout_s=PATIENCE_S)
        sock, _ = listener.accept()
        connection = Connection(sock, is_server=True, kinds=set(Kind), max_message_bytes=1 << 20)
        yield connection, receiver
        connection.close()


ROOM, FRAME = (Kind.ROOM, struct.pack("<QQ", 2, 100)), (Kind.FRAME, b"header")


def start(num_bytes: int) -> tuple[Kind, bytes]:
    return Kind.START, struct.pack("<QQd", 3, num_bytes, 1.0) + b"header"


@pytest.mark.parametrize(
    "said",
    [
        [start(100)],
        [ROOM, start(0)],
        [ROOM, start(101)],
        [ROOM, (Kind.START, struct.pack("<QQd", 3, 100, 1.0))],
        [ROOM, FRAME, start(100)],
        [ROOM, start(100), start(100)],
    ],
)
def test_a_sender_that_starts_what_was_not_granted_is_lost(
    liar: tuple[Connection, Receiver], said: Sequence[tuple[Kind, bytes]]
) -> None:
    connection, receiver = liar
    ended = background(lambda: receive_for_ever(receiver))
    assert next_message(connection).kind is Kind.GREETING
    port, store = serve_store("127.0.0.1", 0)
    connection.write(Kind.GROUP, struct.pack("<QIIHxd", 1, 1, 2, port, 60.0) + b"gloo name")
    join = joined(port, "name", rank=0, size=2)
    assert next_message(connection).data == struct.pack("<Q", 1)
    for kind, data in said:
        connection.write(kind, data)
        if kind is Kind.ROOM:
            assert next_message(connection).data == struct.pack("<Q", 2)
    assert isinstance(ended.exception(PATIENCE_S), BrokenProtocol)
    del join, store


def test_a_loss_is_told_by_the_frame_after_it_however_often_the_group_is_left(
    liar: tuple[Connection, Receiver],
) -> None:
    connection, receiver = liar
    frames = [Frame(b"%d" % number, payload_of(100, number)) for number in range(4)]

    def receive() -> Frame:
        return receiver.receive(timeout_s=PATIENCE_S)

    def await_answer() -> None:
        """Beside the payload that is read."""
        while connection.take() is None:
            receiver.progress()
            connection.read()

    received, flights = background(receive), list[Broadcast]()
    assert next_message(connection).kind is Kind.GREETING
    port, store = serve_store("127.0.0.1", 0)
    connection.write(Kind.GROUP, struct.pack("<QIIHxd", 1, 1, 2, port, 60.0) + b"gloo name")
    join = joined(port, "name", rank=0, size=2)
    assert join.group is not None
    assert next_message(connection).kind is Kind.READY
    connection.write(*ROOM)
    for number, frame in enumerate(frames):
        assert frame.payload is not None
        if number < 2:
            assert next_message(connection).kind is Kind.READY
        else:
            await_answer()
        connection.write(Kind.START, struct.pack("<QQd", 3, 100, 60.0) + frame.header)
        if number < 3:  # the last one never comes
            flights.append(Broadcast(frame.payload))
            flights[-1].start(join.group, 60.0)
        if number < 2:
            assert same_frame(received.result(PATIENCE_S), frame)
            receiver.progress()
        if number == 0:
            received = background(receive)
    while not all(flight.is_done() for flight in receiver._membership.flights):
        time.sleep(0.001)
    for _ in range(2):  # a sender abandons, and does so again when it knows who is lost
        connection.write(Kind.ABANDON, bytes(8))
        await_answer()
    connection.write(*FRAME)
    third, header = receive(), receive()
    assert same_frame(third, frames[2])
    assert (third.follows_loss, header.header, header.follows_loss) == (False, b"header", True)
    del join, store


def receive_for_ever(receiver: Receiver) -> None:
    while True:
        receiver.receive(timeout_s=PATIENCE_S)


def joined(port: int, name: str, *, rank: int, size: int) -> Join:
    """Of a group, by hand."""
    options: dict[str, Any] = {"rank": rank, "size": size, "timeout_s": 60.0}
    join = Join("gloo", None, ("127.0.0.1", port), name, own_host="127.0.0.1", **options)
    join.wait()
    assert join.group is not None
    return join


def next_message(connection: Connection, *, timeout_s: float = PATIENCE_S) -> Message:
    deadline = time.monotonic() + timeout_s
    while (message := connection.take()) is None:
        assert time.monotonic() < deadline
        connection.read()
        time.sleep(0.001)
    return message


def test_a_sender_of_another_back_end_is_told_so(liar: tuple[Connection, Receiver]) -> None:
    other, receiver = liar
    other.write(Kind.GROUP, struct.pack("<QIIHxd", 1, 1, 2, 1, 1.0) + b"nccl name")
    with pytest.raises(TransportTimeout):
        receiver.receive(timeout_s=1)
    other.read()
    answer = other.take(Kind.READY)
    assert answer is not None
    assert answer.data[8:] == b"broadcasts over gloo, the sender over nccl"


def by_hand(link: Link) -> tuple[int, Connection]:
    """A receiver by hand that has greeted the sender."""
    address = link.ends.receiver.args  # type: ignore[attr-defined]
    sock = socket.create_connection(address)
    connection = Connection(sock, is_server=False, kinds=set(Kind), max_message_bytes=1 << 20)
    connection.write(Kind.GREETING, b"")
    (peer,) = greeted(link.sender, 1)
    return peer, connection


def test_a_receiver_that_cannot_join_is_dropped_with_its_reason(link: Link) -> None:
    good = link.add_echo()
    peer, unable = by_hand(link)
    assert link.sender.open_epoch([good, peer], timeout_s=PATIENCE_S) == {}
    answering = background(lambda: complain(unable))
    with pytest.raises(PeerLost, match="two left hands"):
        link.send(Frame(b"x", payload_of(10)))
    assert not link.sender.is_connected(peer)
    answering.result(PATIENCE_S)
    unable.close()
    link.check([good])


def complain(connection: Connection) -> None:
    """Of every group, until the connection ends."""
    while connection.lost is None:
        connection.read()
        if message := connection.take():
            said = b"two left hands" if message.kind is Kind.GROUP else b""
            connection.write(Kind.READY, message.data[:8] + said)
        time.sleep(0.001)


@pytest.mark.parametrize("between", ["a header", "a pause"])
def test_payloads_start_when_all_have_granted_room_after(
    between: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    if between == "a header":
        monkeypatch.setattr(collective, "_FRESH_S", PATIENCE_S)
    good, (peer, late) = link.add_echo(), by_hand(link)
    frames = [Frame(b"%d" % number, payload_of(1000, number)) for number in range(3)]
    answering = background(lambda: take_late(late, len(frames)))
    assert link.sender.open_epoch([good, peer], timeout_s=PATIENCE_S) == {}
    for number, frame in enumerate(frames):
        if number and between == "a pause":
            time.sleep(0.1)
        elif number:
            link.sender.send(Frame(b"header"), timeout_s=PATIENCE_S)
            assert link.sender.collect_replies(timeout_s=PATIENCE_S)[good] == b"header"
        link.send(frame)
        assert link.sender.collect_replies(timeout_s=PATIENCE_S)[good] == answer_to(frame)
    for frame, got in zip(frames, answering.result(PATIENCE_S), strict=True):
        assert same_frame(Frame(frame.header, got), frame)


def take_late(connection: Connection, count: int) -> list[Tensor]:
    """Join, and take payloads; room is granted late, and once more for nothing."""
    with closing(connection):
        return taken_late(connection, count)


def taken_late(connection: Connection, count: int) -> list[Tensor]:
    plan = next_message(connection)
    assert plan.kind is Kind.GROUP
    ticket, rank, size, port, _ = struct.unpack_from("<QIIHxd", plan.data)
    join = joined(port, plan.data[27:].decode().partition(" ")[2], rank=rank, size=size)
    assert join.group is not None
    connection.write(Kind.READY, struct.pack("<Q", ticket))
    taken = []
    for _ in range(count):
        while (room := next_message(connection)).kind is Kind.FRAME:
            connection.write(Kind.REPLY, b"")
        assert room.kind is Kind.ROOM
        time.sleep(0.3)
        connection.read()
        assert connection.take() is None, "it did not wait"
        connection.write(Kind.READY, room.data[:8])
        started = next_message(connection)
        assert started.kind is Kind.START
        payload = torch.empty(struct.unpack_from("<QQ", started.data)[1], dtype=torch.uint8)
        flight = Broadcast(payload)
        flight.start(join.group, 60.0)
        connection.write(Kind.READY, started.data[:8])
        while not flight.is_done():
            time.sleep(0.001)
        taken.append(payload)
        connection.write(Kind.REPLY, b"")
    return taken


def test_readers_grant_ahead_once_they_have_called_progress_for_a_payload(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever starts a payload beside others waits for them on its GPU."""
    link.add(3)
    link.open()
    started, on_start = list[Receiver](), Receiver._on_start

    def note(receiver: Receiver, data: bytes) -> None:
        started.append(receiver)
        on_start(receiver, data)

    monkeypatch.setattr(Receiver, "_on_start", note)
    frames = [Frame(b"%d" % number, payload_of(1000, number)) for number in range(4)]
    last = link.receivers.pop()

    def nothing_starts(count: int, *, calls: bool) -> None:
        for _ in range(30):
            if calls:
                last.progress()
            time.sleep(0.01)
        assert len(started) == count

    def receive() -> Frame:
        return last.receive(timeout_s=PATIENCE_S)

    def send(frame: Frame) -> None:
        """Others receive it, and the `last` one is to grant room for it."""
        received.extend(link.receive_later())
        sent.append(background(lambda: link.send(frame)))

    received, sent = link.receive_later(), list[Any]()
    first = background(receive)
    link.send(frames[0])
    assert same_frame(first.result(PATIENCE_S), frames[0])
    send(frames[1])
    nothing_starts(3, calls=False)
    nothing_starts(3, calls=True)
    assert same_frame(receive(), frames[1])
    send(frames[2])
    while len(started) < 9:  # while the one before is read
        last.progress()
    assert same_frame(receive(), frames[2])
    sent[-1].result(PATIENCE_S)
    received.extend(link.receive_later())
    link.sender.send(Frame(b"header"), timeout_s=PATIENCE_S)
    send(frames[3])
    nothing_starts(9, calls=True)  # who knows what is done when the header is read
    assert receive().header == b"header"
    nothing_starts(9, calls=False)
    assert same_frame(receive(), frames[3])
    assert [one.result(PATIENCE_S) for one in sent] == [None] * 3
    assert len([one.result(PATIENCE_S) for one in received]) == 10


@pytest.mark.promise("Errors", "`TransportUnavailable` says what to use instead.")
@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"backend": "mpi"}, ConfigError, "give gloo or nccl"),
        ({"device": "cuda"}, ConfigError, "not on cuda"),
        ({"secret": b""}, ConfigError, "empty secret"),
        pytest.param(
            {"backend": "nccl"},
            TransportUnavailable,
            "the other backend may do",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs none"),
        ),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        Sender(**options)


def die_in(make: Callable[[], Receiver], phase: str) -> None:
    """Echo, but kill -9 ourselves when the receiver calls `phase` while it is in a group."""
    receiver = make()
    go_on = getattr(receiver, phase)

    def die(*args: object) -> object:
        if receiver._membership.group is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(*args)

    setattr(receiver, phase, die)
    echo(receiver, b"doomed")


PHASES = {"before ready": "_on_room", "after ready": "_on_start", "on its way": "_has_landed"}
every_phase = pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)


# NCCL: one GPU cannot be in a group twice, so every receiver is a process with a GPU of its own

MIB = 1 << 20
CYCLES = 20_000_000  # of a GPU's clock: some 10 ms
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def occupy_gpu(cycles: int) -> None:
    """Keep the current stream busy; the host goes on."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def gpu_receiver(port: int) -> Receiver:
    torch.cuda.set_device("cuda:1")
    return Receiver("127.0.0.1", port, backend="nccl", device="cuda:1")


def echo_on_gpu(port: int) -> None:
    echo(gpu_receiver(port), b"gpu")


def die_on_gpu(port: int, phase: str) -> None:
    die_in(partial(gpu_receiver, port), phase)


def exchange_on_gpu(sender: Sender) -> None:
    peers = list(greeted(sender, 1))
    assert sender.open_epoch(peers, timeout_s=60) == {}
    for num_bytes in (1, 4097, 64 * MIB):
        frame = Frame(b"x", sender.buffer(num_bytes, timeout_s=PATIENCE_S))
        assert frame.payload is not None
        frame.payload.copy_(payload_of(num_bytes))
        expected = answer_to(frame)  # the buffer is not ours once it is sent
        sender.send(frame, timeout_s=PATIENCE_S)
        assert sender.collect_replies(timeout_s=PATIENCE_S) == {peers[0]: expected}


@pytest.mark.multigpu
@two_gpus
@every_phase
def test_nccl_loses_and_regains_a_receiver(phase: str) -> None:
    with closing(Sender(backend="nccl", device="cuda:0")) as sender:
        port = sender.address[1]
        with Child(echo_on_gpu, port) as child:
            exchange_on_gpu(sender)
            child.kill()
            with within(PROMPT_S), pytest.raises(PeerLost):
                send_copy(sender, Frame(b"x", payload_of(MIB)), timeout_s=10)
        with Child(die_on_gpu, port, phase):
            (peer,) = greeted(sender, 1)
            assert sender.open_epoch([peer], timeout_s=60) == {}
            with within(60):  # a group is formed first
                assert peer in lost_on_gpu(sender)
        with Child(echo_on_gpu, port):
            exchange_on_gpu(sender)
    assert not dist.is_initialized()


def lost_on_gpu(sender: Sender) -> dict[int, object]:
    """Send one large payload; the peers that were lost with it."""
    buffer = sender.buffer(256 * MIB, timeout_s=PATIENCE_S)
    with suppress(PeerLost):
        sender.send(Frame(b"deadly", buffer), timeout_s=50)
    replies = sender.collect_replies(timeout_s=PATIENCE_S)
    return {peer: reply for peer, reply in replies.items() if isinstance(reply, PeerLost)}


def add_up_on_gpu(port: int, count: int, calls_progress: bool) -> None:
    """Reply once, with the sums of `count` payloads; they are read on a stream of our own."""
    receiver = gpu_receiver(port)
    receiver.connect(b"sums", timeout_s=PATIENCE_S)
    sums: list[Tensor] = []
    with torch.cuda.stream(new_stream()):
        for _ in range(count):
            payload = receiver.receive(timeout_s=60).payload
            assert payload is not None
            occupy_gpu(CYCLES)  # reading begins late
            sums.append(payload.sum(dtype=torch.int64))
            for _ in range(50 if calls_progress else 0):
                receiver.progress()
        text = b",".join(b"%d" % int(total) for total in sums)
    receiver.reply(text, timeout_s=PATIENCE_S)
    answer_frames(receiver)


@pytest.mark.multigpu
@two_gpus
@pytest.mark.parametrize("calls_progress", [False, True])
def test_nccl_orders_payloads_in_flight_after_packing_and_before_reading(
    calls_progress: bool,
) -> None:
    count, num_bytes = 8, 32 * MIB
    with (
        closing(Sender(backend="nccl", device="cuda:0")) as sender,
        Child(add_up_on_gpu, sender.address[1], count, calls_progress),
    ):
        (peer,) = greeted(sender, 1)
        assert sender.open_epoch([peer], timeout_s=60) == {}
        with torch.cuda.device(0), torch.cuda.stream(new_stream()):
            for number in range(1, count + 1):
                buffer = sender.buffer(num_bytes, timeout_s=PATIENCE_S)
                occupy_gpu(CYCLES)  # packing ends late
                sender.send(Frame(b"x", buffer.fill_(number)), timeout_s=60)
        replies = sender.collect_replies(timeout_s=60)
        expected = b",".join(b"%d" % (n * num_bytes) for n in range(1, count + 1))
        assert replies == {peer: expected}


def watch_gpu(port: int) -> None:
    """Receive two payloads; reply with how long a call waited for our GPU beside the second."""
    receiver = gpu_receiver(port)
    receiver.connect(b"watch", timeout_s=PATIENCE_S)
    receiver.receive(timeout_s=60)
    receiver.reply(b"first", timeout_s=PATIENCE_S)
    waits, is_over = [0.0], threading.Event()

    def watch() -> None:
        torch.cuda.set_device("cuda:1")
        while not is_over.is_set():
            began = time.monotonic()
            torch.cuda.synchronize()
            waits.append(time.monotonic() - began)

    watching = background(watch)
    receiver.receive(timeout_s=60)
    is_over.set()
    watching.result(PATIENCE_S)
    receiver.reply(b"%f" % max(waits), timeout_s=PATIENCE_S)
    answer_frames(receiver)


@pytest.mark.multigpu
@two_gpus
def test_a_trainer_that_is_busy_before_it_packs_occupies_no_gpu_of_a_receiver() -> None:
    with (
        closing(Sender(backend="nccl", device="cuda:0")) as sender,
        Child(watch_gpu, sender.address[1]),
    ):
        (peer,) = greeted(sender, 1)
        assert sender.open_epoch([peer], timeout_s=60) == {}
        replies = []
        with torch.cuda.device(0), torch.cuda.stream(new_stream()):
            for cycles in (CYCLES, 300 * CYCLES):
                began = time.monotonic()
                occupy_gpu(cycles)
                buffer = sender.buffer(MIB, timeout_s=PATIENCE_S)
                buffer.fill_(1)
                sender.send(Frame(b"x", buffer), timeout_s=60)
                took_s = time.monotonic() - began
                replies.append(sender.collect_replies(timeout_s=60)[peer])
        assert replies[0] == b"first"
        assert isinstance(replies[1], bytes)
        assert took_s > 1  # it was busy for some 3 s
        assert float(replies[1]) < 0.5


def echo_on_the_same_gpu(port: int) -> None:
    torch.cuda.set_device("cuda:0")
    echo(Receiver("127.0.0.1", port, backend="nccl", device="cuda:0"), b"gpu")


@pytest.mark.gpu
def test_nccl_on_one_gpu_is_refused_and_the_way_out_named() -> None:
    with (
        closing(Sender(backend="nccl", device="cuda:0")) as sender,
        Child(echo_on_the_same_gpu, sender.address[1]),
    ):
        assert sender.open_epoch(list(greeted(sender, 1)), timeout_s=60) == {}
        with pytest.raises((TransportUnavailable, PeerLost), match="cuda_ipc"):
            send_copy(sender, Frame(b"x", payload_of(10)), timeout_s=60)


@pytest.mark.promise(
    "Security",
    "Both ports of a `collective` sender can be chosen; one in use is named.",
)
def test_both_ports_may_be_chosen_and_one_in_use_is_named() -> None:
    port = free_ports(2)
    with Sender("127.0.0.1", port, store_port=port + 1) as sender:
        assert sender.address == ("127.0.0.1", port)
        for taken in (port, port + 1):
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", taken))
    for taken in (port, port + 1):
        with (
            socket.create_server(("127.0.0.1", taken)),  # the other one is given back
            pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{taken}: .*in use"),
        ):
            Sender("127.0.0.1", port, store_port=port + 1)
    for options in ({"port": -1}, {"port": 65536}, {"store_port": -1}, {"store_port": 65536}):
        with pytest.raises(ConfigError, match="cannot listen on"):
            Sender(**options)  # type: ignore[arg-type]
