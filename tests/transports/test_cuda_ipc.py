"""The CUDA IPC transport keeps the contract, on GPUs and with host memory in their place."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import pytest
import torch
from torch import Tensor

from deltasync.errors import PeerLost, TransportTimeout, TransportUnavailable
from deltasync.testing.links import (
    PATIENCE_S,
    PROMPT_S,
    Ends,
    Link,
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
from deltasync.transports import cuda_ipc
from deltasync.transports.base import Frame, ReceiveTransport
from deltasync.transports.cuda_runtime import Gpu
from deltasync.transports.marks import Mark
from tests.transports.slot_contract import MEMORY_BYTES, Liar, SlotContract, num_descriptors

GRANULE_BYTES = 32 << 20


# Host memory in the place of a GPU: a handle is the path of a memfd


class HostMark(Mark):
    """One byte of shared memory: 1 when the stream has come to the mark."""

    is_stuck: ClassVar[bool] = False  # whether streams of this process stand still

    def __init__(self, flag: Tensor) -> None:
        self.flag = flag

    def set(self) -> Self:
        self.flag.fill_(0 if HostMark.is_stuck else 1)
        return self

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        pass

    def is_done(self) -> bool:
        return bool(self.flag.item())


class HostGpu(Gpu):
    """Counts what is allocated and mapped, which has to end at nothing."""

    num_allocated: ClassVar[int] = 0
    num_mapped: ClassVar[int] = 0

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device("cpu")
        self.uuid = b"host memory here"
        self._descriptors: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> Tensor:
        descriptor = os.memfd_create("gpu", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        memory = mapped(descriptor, num_bytes)
        self._descriptors[memory.data_ptr()] = descriptor
        HostGpu.num_allocated += 1
        return memory

    def free(self, memory: Tensor) -> None:
        os.close(self._descriptors.pop(memory.data_ptr()))
        HostGpu.num_allocated -= 1

    def export(self, memory: Tensor) -> bytes:
        descriptor = self._descriptors[memory.data_ptr()]
        return f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")

    def exported_mark(self) -> tuple[Mark, bytes]:
        descriptor = os.memfd_create("mark", os.MFD_CLOEXEC)  # never closed: marks are few
        os.ftruncate(descriptor, 1)
        mark = HostMark(mapped(descriptor, 1).fill_(1))
        return mark, f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")

    def open(
        self, owner: bytes, memory: bytes, event: bytes, num_bytes: int
    ) -> tuple[Tensor, Mark]:
        if owner != self.uuid:
            raise TransportUnavailable("that GPU is not here; walk around it")
        try:
            opened = opened_at(memory, num_bytes), HostMark(opened_at(event, 1))
        except OSError as error:
            raise TransportUnavailable(str(error)) from error
        HostGpu.num_mapped += 1
        return opened

    def close(self, memory: Tensor) -> None:
        HostGpu.num_mapped -= 1


def mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def opened_at(handle: bytes, num_bytes: int) -> Tensor:
    path = handle.rstrip(b"\0").decode(errors="replace")
    if not path.startswith("/proc/"):
        raise OSError(errno.EINVAL, "not a handle")
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mapped(descriptor, num_bytes)
    finally:
        os.close(descriptor)


class HostSender(cuda_ipc.Sender):
    gpu_class = HostGpu


class HostReceiver(cuda_ipc.Receiver):
    gpu_class = HostGpu

    def _new_mark(self) -> Mark:
        return HostMark(torch.ones(1, dtype=torch.uint8))


class Exported:
    """Memory of a sender, leased to each receiver that is told of it."""

    def __init__(self, gpu: Gpu) -> None:
        self.exported = cuda_ipc._Exported(gpu, MEMORY_BYTES)

    @contextmanager
    def announced(self) -> Iterator[tuple[bytes, int]]:
        with self.exported.lease() as descriptor:
            yield b"".join(self.exported.handles), descriptor

    def close(self) -> None:
        assert not self.exported.is_mapped()  # receivers gave every lease back
        self.exported.free()


UUID = b"host memory here"
NOWHERE = b"/proc/0/fd/0".ljust(64, b"\0")


class TestHostMemory(SlotContract):
    def ends(self, tmp_path: Path) -> Ends:
        path = tmp_path / "socket"
        sender = partial(HostSender, path)
        receiver = partial(HostReceiver, path)
        return Ends(sender, receiver, crosses_processes=False)  # they do: on GPUs, and see below

    def memory(self) -> Exported:
        return Exported(HostGpu())

    def num_held(self) -> int:
        cuda_ipc._free_unmapped()
        return HostGpu.num_allocated + HostGpu.num_mapped + num_descriptors("pipe:")

    def test_receivers_of_other_processes_map_the_buffer(self, link: Link, apart: None) -> None:
        self.test_the_buffer_is_what_receivers_read(link)
        assert HostGpu.num_mapped == 2 * len(link.receivers)

    @pytest.mark.parametrize(
        "handles",
        [bytes(16) + NOWHERE + NOWHERE, UUID + NOWHERE + NOWHERE, UUID + bytes(64) + bytes(64)],
        ids=["another GPU", "freed memory", "no handles"],
    )
    def test_memory_that_cannot_be_mapped_is_unavailable(
        self, liar: tuple[Liar, ReceiveTransport], handles: bytes
    ) -> None:
        liar[0].announce(rest=handles)
        with within(PROMPT_S), pytest.raises(TransportUnavailable):
            liar[1].receive(timeout_s=PATIENCE_S)
        with pytest.raises(PeerLost):
            liar[1].receive(timeout_s=PATIENCE_S)

    @pytest.mark.usefixtures("apart")
    def test_memory_is_freed_only_when_nobody_maps_it(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda_ipc._Slot, "granule_bytes", 4096)
        link.add(2)
        link.open()
        link.exchange(Frame(b"x", payload_of(10)))
        link.exchange(Frame(b"let go"))
        idle = link.receivers.pop()
        link.sender.drop(link.peers.pop())
        assert link.sender.open_epoch(link.peers, timeout_s=1) == {}
        assert HostGpu.num_allocated == 1
        link.receivers[0].reply(b"let go", timeout_s=PROMPT_S)  # which comes after that it did
        assert link.sender.collect_replies(timeout_s=PROMPT_S) == {link.peers[0]: b"let go"}
        for num_bytes in (4097, 10, 10, 10):  # each is sent while the one before is held
            frame = Frame(b"x", payload_of(num_bytes))
            link.send(frame)
            assert same_frame(link.receivers[0].receive(timeout_s=PROMPT_S), frame)
        # The dropped receiver does not know yet, and maps what was replaced.
        assert HostGpu.num_allocated == 3
        with pytest.raises(PeerLost):
            idle.receive(timeout_s=PROMPT_S)
        link.exchange(Frame(b"x", payload_of(10)))
        assert HostGpu.num_allocated == 2

    def test_a_payload_is_handed_out_when_it_is_filled(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link.add(1)
        link.open()
        monkeypatch.setattr(HostMark, "is_stuck", True)
        frame = Frame(b"x", payload_of(100))
        link.send(frame)
        for number in range(3):
            link.sender.send(Frame(b"%d" % number), timeout_s=1)
        for _ in range(2):
            with within(PROMPT_S), pytest.raises(TransportTimeout):
                link.receivers[0].receive(timeout_s=0.1)
        monkeypatch.setattr(HostMark, "is_stuck", False)
        run_streams(link)
        assert same_frame(link.receivers[0].receive(timeout_s=1), frame)
        headers = [link.receivers[0].receive(timeout_s=1).header for _ in range(3)]
        assert headers == [b"0", b"1", b"2"]

    def test_a_slot_is_given_back_when_its_reads_are_done(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link.add(1)
        link.open()
        reads = HostMark(torch.zeros(1, dtype=torch.uint8))

        def set_all_but_reads(mark: HostMark) -> HostMark:
            mark.flag.fill_(mark is not reads)
            return mark

        monkeypatch.setattr(HostReceiver, "_new_mark", lambda _: reads)
        monkeypatch.setattr(HostMark, "set", set_all_but_reads)
        link.exchange(Frame(b"1", payload_of(100)))
        # The next one arrives although the first is still being read.
        link.exchange(Frame(b"2", payload_of(100)))
        lent = background(lambda: link.sender.buffer(100, timeout_s=PATIENCE_S))
        with pytest.raises(TransportTimeout):
            link.receivers[0].receive(timeout_s=0.2)
        assert not lent.done()
        received = link.receive_later()
        time.sleep(0.05)
        reads.flag.fill_(1)
        with within(PROMPT_S):
            lent.result(PROMPT_S)
        link.sender.send(Frame(b"3"), timeout_s=1)
        assert received[0].result(PROMPT_S).header == b"3"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers of this process open handles as if they were in another."""
    forgetful = type("Forgetful", (dict,), {"__setitem__": lambda *_: None})
    monkeypatch.setattr(cuda_ipc, "_exported", forgetful())


def run_streams(link: Link) -> None:
    """What the sender's streams were given is done."""
    for slot in link.sender._slots:  # type: ignore[attr-defined]
        slot.mark.set()


# Where it cannot work


@pytest.mark.promise("Errors", "`TransportUnavailable` says what to use instead.")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
@pytest.mark.parametrize("end", [cuda_ipc.Sender, cuda_ipc.Receiver])
def test_no_gpu_is_unavailable(path: Path, end: Callable[[Path], object]) -> None:
    with pytest.raises(TransportUnavailable, match="shared memory"):
        end(path)
    assert not path.exists()


# GPUs


@pytest.mark.gpu
class TestOneGpu(SlotContract):
    """Receivers of this process read the memory as it is, those of others map it."""

    def ends(self, tmp_path: Path) -> Ends:
        path = tmp_path / "socket"
        sender = partial(cuda_ipc.Sender, path)
        receiver = partial(cuda_ipc.Receiver, path)
        return Ends(sender, receiver, crosses_processes=True)

    def memory(self) -> Exported:
        return Exported(Gpu(None))

    def num_held(self) -> int:
        """The leases of mapped memory."""
        torch.cuda.synchronize()  # the first call of a process opens pipes of CUDA's own
        cuda_ipc._free_unmapped()
        return num_descriptors("pipe:")


@pytest.mark.multigpu
class TestTwoGpus(TransportContract):
    """Receivers live on another GPU than the sender."""

    def ends(self, tmp_path: Path) -> Ends:
        path = tmp_path / "socket"
        sender = partial(cuda_ipc.Sender, path, device="cuda:0")
        receiver = partial(cuda_ipc.Receiver, path, device="cuda:1")
        return Ends(sender, receiver, crosses_processes=True)


def echo_on_gpu(path: Path, device: str) -> None:
    torch.cuda.set_device(device)
    echo(cuda_ipc.Receiver(path), b"gpu")


def exchange_on_gpu(sender: cuda_ipc.Sender, peers: list[int], sizes: list[int]) -> None:
    """Send and check payloads of `sizes`, filled on a stream of their own."""
    assert sender.open_epoch(peers, timeout_s=PATIENCE_S) == {}
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):  # type: ignore[no-untyped-call]
        for seed, num_bytes in enumerate(sizes):
            frame = Frame(b"x", sender.buffer(num_bytes, timeout_s=PATIENCE_S))
            assert frame.payload is not None
            frame.payload.copy_(payload_of(num_bytes, seed))
            sender.send(frame, timeout_s=PATIENCE_S)
            replies = sender.collect_replies(timeout_s=PATIENCE_S)
            answer = answer_to(Frame(b"x", payload_of(num_bytes, seed)))
            assert replies == dict.fromkeys(peers, answer)


SIZES = [1, 4097, GRANULE_BYTES, 64 << 20, 3]


@pytest.mark.gpu
def test_expandable_segments_do_not_matter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the children alone: spawned with this environment, in which torch starts anew.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    with Child(send_on_gpu, path, SIZES) as sender, Child(echo_on_gpu, path, "cuda:0"):
        sender.wait(timeout_s=100)


def send_on_gpu(path: Path, sizes: list[int]) -> None:
    with closing(cuda_ipc.Sender(path)) as sender:
        exchange_on_gpu(sender, list(greeted(sender, 1)), sizes)


def keep_busy(seconds: float) -> None:
    """Let the current stream spin; clocks run at about 2 GHz."""
    torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]


def send_behind_a_busy_stream(path: Path, busy_s: float) -> None:
    """Send one payload at once, and one that is filled only after `busy_s`; then stay."""
    sender = cuda_ipc.Sender(path)
    peers = list(greeted(sender, 1))
    exchange_on_gpu(sender, peers, [1 << 20])
    keep_busy(busy_s)
    sender.send(Frame(b"late", sender.buffer(1 << 20, timeout_s=1).fill_(7)), timeout_s=1)
    time.sleep(100)


@pytest.mark.gpu
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_payload_behind_a_busy_stream(path: Path, is_killed: bool) -> None:
    """Comes whole when it comes; a sender killed before leaves no stream that waits."""
    with (
        Child(send_behind_a_busy_stream, path, 3.0) as child,
        closing(cuda_ipc.Receiver(path)) as receiver,
    ):
        receiver.connect(b"hello", timeout_s=PATIENCE_S)
        frame = receiver.receive(timeout_s=PATIENCE_S)
        assert frame.payload is not None
        assert torch.equal(frame.payload.cpu(), payload_of(1 << 20))
        receiver.reply(answer_to(frame), timeout_s=PATIENCE_S)
        with pytest.raises(TransportTimeout):
            receiver.receive(timeout_s=0.5)
        if is_killed:
            child.kill()
            with within(PROMPT_S), pytest.raises(PeerLost):
                receiver.receive(timeout_s=PATIENCE_S)
        else:
            frame = receiver.receive(timeout_s=PATIENCE_S)
            assert frame.payload is not None
            assert bool((frame.payload == 7).all())
        with within(PROMPT_S):
            torch.cuda.synchronize()
        assert int(torch.ones(10, device="cuda").sum()) == 10


@pytest.mark.gpu
def test_a_slot_is_not_written_while_a_stream_still_reads_it(path: Path) -> None:
    with (
        closing(cuda_ipc.Sender(path)) as sender,
        closing(cuda_ipc.Receiver(path)) as receiver,
    ):
        copies = background(lambda: copy_slowly(receiver, 8))
        assert sender.open_epoch(list(greeted(sender, 1)), timeout_s=1) == {}
        for number in range(8):
            buffer = sender.buffer(1 << 20, timeout_s=PATIENCE_S).fill_(number)
            sender.send(Frame(b"x", buffer), timeout_s=PATIENCE_S)
        assert copies.result(PATIENCE_S) == list(range(8))


def copy_slowly(receiver: cuda_ipc.Receiver, count: int) -> list[int]:
    """What stands in each payload when a busy stream comes to it."""
    receiver.connect(b"", timeout_s=PATIENCE_S)
    copies = []
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(count):
            payload = receiver.receive(timeout_s=PATIENCE_S).payload
            assert payload is not None
            keep_busy(0.05)
            copies.append(payload.clone())
        return [int(copy.float().mean()) for copy in copies]


@pytest.mark.gpu
def test_handles_that_are_none_are_unavailable_and_leave_no_error() -> None:
    gpu = Gpu(None)
    with pytest.raises(TransportUnavailable, match="collective"):
        gpu.open(gpu.uuid, bytes(64), bytes(64), 4096)
    with pytest.raises(TransportUnavailable, match="not visible"):
        gpu.open(bytes(16), bytes(64), bytes(64), 4096)
    assert int(torch.ones(10, device="cuda").sum()) == 10
