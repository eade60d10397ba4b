"""The collective transport keeps the contract over gloo, and its own promises."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    PeerLost,
    TransportTimeout,
    TransportUnavailable,
)
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
    within,
)
from deltasync.testing.processes import Child
from deltasync.testing.transport import TransportContract
from deltasync.transports import collective
from deltasync.transports.base import Frame
from deltasync.transports.collective import DEFAULT_MAX_PAYLOAD_BYTES, Receiver, Sender
from deltasync.transports.control import Connection, Kind


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ends(secret: bytes | None = None, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> Ends:
    port = free_port()
    sender = partial(Sender, "127.0.0.1", port, secret=secret, max_payload_bytes=max_payload_bytes)
    return Ends(sender, partial(Receiver, "127.0.0.1", port, secret=secret), True)


class TestGloo(TransportContract):
    def ends(self, tmp_path: Path, max_payload_bytes: int) -> Ends:
        return ends(max_payload_bytes=max_payload_bytes)


@pytest.fixture(params=[None, b"shared"], ids=["plain", "signed"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    with ExitStack() as stack:
        yield Link(ends(request.param), stack)


@pytest.mark.timeout(60)
def test_the_default_group_is_neither_used_nor_made(link: Link) -> None:
    link.add(2)
    link.open()
    frame = Frame(b"x", payload_of(1000))
    assert all(same_frame(got, frame) for got in link.exchange(frame))
    assert not dist.is_initialized()


@pytest.mark.timeout(60)
def test_the_epoch_may_shrink_and_grow(link: Link) -> None:
    echoes = [link.add_echo() for _ in range(3)]
    for peers in (echoes[:1], echoes, echoes[1:], echoes[:2]):
        link.check(peers)


@pytest.mark.timeout(60)
def test_who_is_not_receiving_is_not_waited_for_inside_the_back_end(link: Link) -> None:
    good = link.add_echo()
    link.add(1)
    assert link.sender.open_epoch([good, *link.peers], timeout_s=0.5) == {}
    with within(PROMPT_S), pytest.raises(TransportTimeout):
        link.sender.send(Frame(b"late", payload_of(10)), timeout_s=0.5)
    assert not link.sender.is_connected(link.peers[0])
    link.check([good])


@pytest.mark.timeout(60)
def test_a_payload_that_a_receiver_is_late_for_reaches_nobody(link: Link) -> None:
    link.add(2)
    link.open()
    received = background(lambda: link.receivers[0].receive(timeout_s=PATIENCE_S))
    with within(PROMPT_S), pytest.raises(TransportTimeout):
        link.sender.send(Frame(b"half", payload_of(1000)), timeout_s=0.5)
    assert [link.sender.is_connected(peer) for peer in link.peers] == [True, False]
    # The survivor waits on, and the next payload forms a new group by itself.
    frame = Frame(b"whole", payload_of(1000))
    link.sender.send(frame, timeout_s=PATIENCE_S)
    assert same_frame(received.result(PATIENCE_S), frame)


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
from deltasync.testing.links import greeted
from deltasync.transports.base import Frame
from deltasync.transports.collective import Sender

sender = Sender("127.0.0.1", int(sys.argv[1]))
assert sender.open_epoch(list(greeted(sender, 1)), timeout_s=20) == {}
frame = Frame(b"x", torch.zeros(256 << 20, dtype=torch.uint8))
try:
    while True:
        sender.send(frame, timeout_s=1)
except TransportTimeout:
    pass

class SlowExit:
    # Keeps the interpreter busy with its own end while the back end gives up.
    def __del__(self, sleep=time.sleep):
        sleep(2.5)

slow_exit = SlowExit()
"""


@pytest.mark.timeout(90)
def test_a_process_that_left_a_stuck_group_exits_well() -> None:
    port = free_port()
    with Child(stop_while_receiving, partial(Receiver, "127.0.0.1", port)):
        root = str(Path(collective.__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", SEND_UNTIL_LATE, str(port)],
            cwd=root,
            timeout=80,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(60)
def test_receivers_refuse_payloads_beyond_their_limit() -> None:
    with ExitStack() as stack:
        all_ends = ends()
        host, port = all_ends.receiver.args  # type: ignore[attr-defined]
        small = Ends(all_ends.sender, partial(Receiver, host, port, max_payload_bytes=99), True)
        link = Link(small, stack)
        link.add(1)
        link.open()
        received = link.receive_later()
        with pytest.raises(PeerLost):
            link.sender.send(Frame(b"x", payload_of(100)), timeout_s=PATIENCE_S)
        assert isinstance(received[0].exception(PATIENCE_S), PeerLost)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Kind.FRAME, b"short"),
        (Kind.FRAME, struct.pack("<Qqd", 1, 1 << 62, 1.0) + b"header"),
        (Kind.FRAME, struct.pack("<Qqd", 1, -2, 1.0) + b"header"),
        (Kind.GROUP, b"short"),
        (Kind.GROUP, struct.pack("<QIIHd", 1, 2, 2, 1, 1.0) + b"name"),
        (Kind.GROUP, struct.pack("<QIIHd", 1, 0, 2, 1, 1.0) + b"name"),
        (Kind.START, bytes(8)),
        (Kind.START, struct.pack("<Q", 7)),
        (Kind.SENT, bytes(8)),
        (Kind.SENT, b""),
        (Kind.ABANDON, b"short"),
    ],
)
def test_a_sender_that_lies_is_lost(kind: Kind, data: bytes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Receiver(*listener.getsockname())) as receiver,
    ):
        receiver.connect(b"", timeout_s=PATIENCE_S)
        sock, _ = listener.accept()
        liar = Connection(sock, is_server=True, kinds=set(Kind), max_message_bytes=1 << 20)
        liar.write(kind, data)
        with pytest.raises(PeerLost):
            receiver.receive(timeout_s=PATIENCE_S)
        liar.close()


def test_a_receiver_that_lies_is_lost() -> None:
    with ExitStack() as stack:
        link = Link(ends(), stack)
        good = link.add_echo()
        host, port = link.ends.receiver.args  # type: ignore[attr-defined]
        liar = Connection(
            socket.create_connection((host, port)),
            is_server=False,
            kinds=set(Kind),
            max_message_bytes=1 << 20,
        )
        liar.write(Kind.GREETING, b"")
        (peer,) = greeted(link.sender, 1)
        liar.write(Kind.READY, b"nonsense")
        with suppress(PeerLost):  # it may be found out here or by the payload
            link.sender.open_epoch([good, peer], timeout_s=PATIENCE_S)
            link.sender.send(Frame(b"lied to", payload_of(10)), timeout_s=PATIENCE_S)
        assert not link.sender.is_connected(peer)
        liar.close()
        link.check([good])


def test_ports_in_use_are_refused() -> None:
    with closing(Sender()) as sender, pytest.raises(ConfigError):
        Sender(*sender.address)


@pytest.mark.parametrize("options", [{"backend": "mpi"}, {"device": "cuda"}, {"secret": b""}])
def test_options_that_cannot_work_are_refused(options: dict[str, str | bytes]) -> None:
    with pytest.raises(DeltaSyncError):
        Sender(**options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_nccl_without_gpus_is_unavailable() -> None:
    with pytest.raises(TransportUnavailable):
        Sender(backend="nccl")


# NCCL: one GPU cannot be in a group twice, so every receiver is a process with a GPU of its own


def echo_on_gpu(port: int, device: str) -> None:
    torch.cuda.set_device(device)
    echo(Receiver("127.0.0.1", port, backend="nccl", device=device), b"gpu")


@pytest.mark.multigpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_sends_loses_and_regains_a_receiver() -> None:
    with closing(Sender(backend="nccl", device="cuda:0")) as sender:
        port = sender.address[1]
        with Child(echo_on_gpu, port, "cuda:1") as child:
            exchange_on_gpu(sender)
            child.kill()
            with pytest.raises(PeerLost):
                sender.send(Frame(b"x", payload_of(1 << 20).to("cuda:0")), timeout_s=10)
        with Child(echo_on_gpu, port, "cuda:1"):
            exchange_on_gpu(sender)
    assert not dist.is_initialized()


def exchange_on_gpu(sender: Sender) -> None:
    peers = list(greeted(sender, 1))
    assert sender.open_epoch(peers, timeout_s=60) == {}
    for num_bytes in (0, 1, 4097, 64 << 20):
        frame = Frame(b"x", sender.buffer(num_bytes, timeout_s=PATIENCE_S))
        assert frame.payload is not None
        frame.payload.copy_(payload_of(num_bytes))
        sender.send(frame, timeout_s=PATIENCE_S)
        replies = sender.collect_replies(timeout_s=PATIENCE_S)
        assert replies == {peers[0]: answer_to(frame)}
