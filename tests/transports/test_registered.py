"""The collective transport takes back ends that others register with torch.distributed."""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltasync.errors import ConfigError, PeerLost, TransportUnavailable
from deltasync.testing.links import PATIENCE_S, Ends, Link, background, payload_of, same_frame
from deltasync.transports.address import Address
from deltasync.transports.base import Frame
from deltasync.transports.collective import Receiver, Sender
from deltasync.transports.process_group import BroadcastStream, GroupSpec, Join, serve_store
from tests.worlds.ranks import free_port

calls: list[str] = []


class Wrapped(dist.ProcessGroup):
    """A process group in Python, as packages for other accelerators have: gloo by another name."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # one of its two forms
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(  # type: ignore[override]  # the other form is not called
        self, tensors: list[Tensor], opts: dist.BroadcastOptions, /
    ) -> Any:
        calls.append("wrapped")
        return self._gloo.broadcast(tensors, opts)


class Stuck(Wrapped):
    """Its broadcasts wait until they are aborted, as those of NCCL for a peer that has died."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_aborted = Event()

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: dist.BroadcastOptions, /
    ) -> Any:
        self._is_aborted.wait(60)
        raise RuntimeError("was aborted")

    def abort(self) -> None:
        self._is_aborted.set()


class Failing(Stuck):
    """It fails at those that receive, and at the sender waits for them."""

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: dist.BroadcastOptions, /
    ) -> Any:
        if self.rank():
            raise RuntimeError("no way to the sender")
        return super().broadcast(tensors, opts)


def extended(options: Any, backend_options: object) -> dist.ProcessGroupGloo:
    assert backend_options is None
    assert options.global_ranks_in_group == list(range(options.group_size))
    assert options.group_id
    calls.append("extended")
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )


def register() -> None:
    """As importing such a package does, once in each process."""
    if "WRAPPED" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("wrapped", Wrapped, devices=["cpu"])
    dist.Backend.register_backend("extended", extended, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("stuck", Stuck, devices=["cpu"])
    dist.Backend.register_backend("failing", Failing, devices=["cpu"])
    dist.Backend.register_backend("elsewhere", Wrapped, devices=["npu"])


def make_sender(port: int, backend: str, max_payload_bytes: int = 1 << 30) -> Sender:
    register()
    return Sender("127.0.0.1", port, backend=backend, max_payload_bytes=max_payload_bytes)


def make_receiver(port: int, backend: str) -> Receiver:
    register()
    return Receiver("127.0.0.1", port, backend=backend)


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    calls.clear()


@pytest.mark.parametrize("backend", ["wrapped", "extended"])
def test_payloads_go_over_the_registered_back_end(backend: str) -> None:
    with ExitStack() as stack:
        port = free_port()
        make = partial(make_sender, port, backend), partial(make_receiver, port, backend)
        link = Link(Ends(*make, crosses_processes=True), stack)
        link.add(2)
        child, peer = link.add_process()
        link.check([peer])
        child.kill()
        with suppress(PeerLost):
            link.sender.send(Frame(b"x"), timeout_s=PATIENCE_S)
        link.open()
        calls.clear()
        for number in range(3):
            frame = Frame(b"x", payload_of(100_000, seed=number))
            assert all(same_frame(got, frame) for got in link.exchange(frame))
        assert len(calls) >= 3
        assert set(calls) == {backend}
        assert link.sender.capabilities.devices == ("cpu",)
        assert not dist.is_initialized()
        assert Address.of(link.sender) is None


def test_a_group_of_which_the_first_broadcast_hangs_is_given_up_in_time() -> None:
    """The interpreter waits for the thread that forms a group: it would never exit."""
    port, store = serve_store("127.0.0.1", 0)
    spec = GroupSpec(
        backend="stuck",
        stream=BroadcastStream(torch.device("cpu")),
        store_host="127.0.0.1",
        store_port=port,
        name="group",
        rank=0,
        size=1,
        timeout_s=0.5,
        own_host="127.0.0.1",
    )
    join = Join(spec)
    join.wait()
    assert (join.group, join.error) == (None, "was aborted")
    del store


def test_who_cannot_connect_is_to_blame_and_not_the_sender_that_gives_up() -> None:
    port = free_port()
    with (
        closing(make_sender(port, "failing")) as sender,
        closing(make_receiver(port, "failing")) as receiver,
    ):
        receiver.connect(b"", timeout_s=PATIENCE_S)
        ((peer, _),) = sender.poll(timeout_s=PATIENCE_S)
        assert sender.open_epoch([peer], timeout_s=1) == {}
        received = background(lambda: receiver.receive(timeout_s=PATIENCE_S))
        with pytest.raises(PeerLost, match="no way to the sender"):
            sender.send(Frame(b"x", payload_of(10)), timeout_s=5)
        with pytest.raises(PeerLost):
            received.result(PATIENCE_S)


@pytest.mark.promise("Errors", "`TransportUnavailable` says what to use instead.")
@pytest.mark.parametrize(
    ("backend", "device", "error", "why"),
    [
        ("hccl", None, ConfigError, r"unknown backend 'hccl'; known are .*wrapped"),
        ("elsewhere", None, TransportUnavailable, "no device of type npu"),
        ("elsewhere", "npu:0", ConfigError, "this torch knows no device 'npu:0'"),
        ("elsewhere", "cpu", ConfigError, "elsewhere moves payloads on npu, not on cpu"),
    ],
)
def test_what_is_not_there_is_refused(
    backend: str, device: str | None, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        Sender(backend=backend, device=device)
