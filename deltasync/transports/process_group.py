"""Process groups of our own: formed, used and left without blocking the caller.

The only file that knows how back ends differ, and what streams have to do with it. gloo is made as
torch makes it, NCCL is called directly (nccl.py). Whatever a back end blocks in runs on a thread
that ends with the timeout it was given; the interpreter waits for it before it exits, because a
thread that returns from a back end into an interpreter that is gone would crash the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from deltasync.errors import ConfigError, TransportUnavailable
from deltasync.transports import forks, nccl
from deltasync.transports.control.connection import deadline_in, left_s
from deltasync.transports.control.tcp import listen_tcp
from deltasync.transports.marks import Mark

Work = dist.Work | nccl.Flight


class Group(Protocol):
    """What is used of a process group."""

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> Work: ...

    def abort(self) -> None: ...


_MAX_TIMEOUT_S = 24 * 3600.0
_MIN_TIMEOUT_S = 0.01
_POLL_S = 0.0005
_ABORT_S = 1.0  # a GPU may still write where an aborted broadcast was to go
_GROWTH_BITS = 5  # lengths of slots are rounded up to so many leading bits
_WAY_OUT = {"nccl": "; NCCL wants a GPU of its own for every member: on one GPU use cuda_ipc"}


def bounded(timeout_s: float) -> float:
    """A timeout as back ends take it: neither zero nor endless, whatever arrived."""
    return min(max(_MIN_TIMEOUT_S, timeout_s), _MAX_TIMEOUT_S)  # the least for what is no number


def device_of(backend: str, device: torch.device | str | None) -> torch.device:
    """The device that payloads live on, with the back end ready to connect.

    Raises TransportUnavailable, ConfigError.
    """
    if backend == "gloo":
        available, kind = dist.is_gloo_available(), "cpu"
    elif backend == "nccl":
        available, kind = dist.is_nccl_available() and torch.cuda.is_available(), "cuda"
    else:
        raise ConfigError(f"unknown backend {backend!r}: give gloo or nccl")
    if not available:
        raise TransportUnavailable(
            f"this machine or this build of torch cannot run {backend}; the other backend may do"
        )
    if device is None:
        device = "cpu" if kind == "cpu" else f"cuda:{torch.cuda.current_device()}"
    device = torch.device(device)
    if device.type != kind:
        raise ConfigError(f"{backend} moves payloads on {kind}, not on {device}")
    if backend == "nccl":
        nccl.warm_up(device)  # here, where nobody waits for this end
    return device


def serve_store(host: str, port: int) -> tuple[int, TCPStore]:
    """A rendezvous store on `port` of `host` alone, or on a free one for 0; and the port.

    Raises ConfigError if it cannot listen there.
    """
    listener = listen_tcp(host, port)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return port, forks.kept_in_children(store)


class PayloadBuffer:
    """One of the buffers that an end uses again and again, and keeps.

    Attributes:
        flight: The broadcast out of it or into it, until that is known to have ended well.
        mark: When its memory is ours: the payload is packed, or the last one was read.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.flight: Broadcast | None = None
        self.mark = Mark(device)

    def fits(self, num_bytes: int) -> bool:
        return self._memory.numel() >= num_bytes

    def view(self, num_bytes: int) -> Tensor:
        """Its first bytes, uint8[num_bytes]. It grows if they do not fit, and is marked then.

        What it held before is given up first, and it grows by a sixteenth at least: payloads that
        are all nearly as long as allowed do not make it grow again and again.
        """
        if not self.fits(num_bytes):
            step = 1 << max(0, num_bytes.bit_length() - _GROWTH_BITS)
            self._memory = self._memory.new_empty(0)
            self._memory = self._memory.new_empty(-(-num_bytes // step) * step)
            self.mark.set()  # an allocator may hand out what its stream has still to finish with
        return self._memory[:num_bytes]

    def holds(self, payload: Tensor) -> bool:
        """Whether `payload`, not empty, lies in its memory."""
        return payload.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def abandon(self) -> None:
        """Give up the memory if a broadcast still reads or writes it."""
        if self.flight is not None and not self.flight.is_done():
            self._memory = self._memory.new_empty(0)
        self.flight = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Which group to form, and as whom.

    Attributes:
        backend: "gloo" or "nccl".
        stream: See `Membership`.
        store_host: Where the sender serves the rendezvous store.
        store_port: Its port.
        name: Of the group; prefixes its keys.
        rank: Our own; the sender is 0.
        size: Number of members.
        timeout_s: After which forming the group gives up.
        own_host: Our address on the network that leads to the sender.
    """

    backend: str
    stream: torch.cuda.Stream | None
    store_host: str
    store_port: int
    name: str
    rank: int
    size: int
    timeout_s: float
    own_host: str

    def form(self, is_left: Callable[[], bool]) -> Group | None:
        """Form the group and prove it by a first broadcast. Blocks; raises RuntimeError.

        None if it `is_left` before it begins. Of a communicator that loses a member as it begins,
        NCCL closes nothing in the others. So rank 0, which hears of losses, does not let it begin
        once it knows of one.
        """
        deadline, timeout = deadline_in(self.timeout_s), timedelta(seconds=self.timeout_s)
        # A connection of its own: one that waits for keys in vain would block the next plan.
        tcp = TCPStore(
            self.store_host,
            self.store_port,
            None,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )
        store = PrefixStore(self.name, tcp)
        group: Group
        if self.backend == "nccl":
            # NCCL waits for ever for a member that never comes, and nothing can abort that.
            store.set(f"here/{self.rank}", "")
            store.wait([f"here/{rank}" for rank in range(self.size)], timeout)
            if is_left():
                return None
            group = _nccl_group(self, store)
        else:  # whose members meet as it is made
            group = _gloo_group(self, store, timeout)
        if is_left():
            _abort(group)
            return None
        with _current(self.stream):
            device = self.stream.device if self.stream else torch.device("cpu")
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            first = Broadcast(group, byte, self.stream, bounded(left_s(deadline)))
        if not _ends_within(left_s(deadline), [first]) or first.error is not None:
            error = first.error or "the first broadcast did not end in time"
            groups = [group]
            del group
            _release(groups, None, [first])
            raise RuntimeError(error)
        return group


class Join:
    """Forms a group on a thread of its own, since back ends block while they connect.

    Attributes:
        group: The group once done, if there is no error.
        error: Why there is none.
    """

    def __init__(self, plan: GroupSpec) -> None:
        self.group: Group | None = None
        self.error: str | None = None
        self._is_left = False
        self._thread = threading.Thread(target=self._run, args=(plan,))
        try:
            self._thread.start()
        except RuntimeError as error:  # none is left, or the interpreter shuts down
            self.error = str(error)

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Nobody needs the group any more. That it does not begin then is no error."""
        self._is_left = True

    def wait(self) -> None:
        """Until done: at most for the plan's timeout."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self, plan: GroupSpec) -> None:
        error: str | None = "the group could not be formed"
        try:
            self.group = plan.form(lambda: self._is_left)
            error = None
        except RuntimeError as raised:
            error = f"{raised}{_WAY_OUT.get(plan.backend, '')}"
        finally:
            self.error = error


class Broadcast:
    """One broadcast from rank 0 that is polled, never waited for.

    Attributes:
        error: Why it failed, once it is done.
    """

    def __init__(
        self, group: Group, tensor: Tensor, stream: torch.cuda.Stream | None, timeout_s: float
    ) -> None:
        """Start to broadcast uint8[n]; `tensor` stays in use until done, or for good if left."""
        self.error: str | None = None
        self._tensor: Tensor | None = tensor
        self._work: Work | None = None
        forks.inert_in_children(self._forked)
        options = dist.BroadcastOptions()  # from rank 0, and not waited for
        options.timeout = timedelta(seconds=timeout_s)
        try:
            with _current(stream):
                self._work = group.broadcast([tensor], options)
        except RuntimeError as error:
            self.error = str(error)

    def _forked(self) -> None:
        """What it waits for runs in the parent, and its end would wait for a thread of there."""
        if self._work is not None:
            forks.keep(self._work)
            self._work, self.error = None, forks.PARENTS_OWN

    def is_done(self) -> bool:
        """Whether it has ended. If so the caller's current stream comes after it."""
        if self._work is not None and self._work.is_completed():
            try:
                # Complete, so this does not block; on GPUs it orders the current stream.
                self._work.wait()
            except RuntimeError as error:
                self.error = str(error)
            self._work = self._tensor = None
        return self._work is None


class Membership:
    """The group an end is in, and what runs inside the back end.

    Attributes:
        group: The group, or None. Hold no other reference: dropping the last one can block.
        join: The group that is being formed.
        stream: Where broadcasts are launched: on a GPU one of their own, on which nothing else
            runs. NCCL orders a broadcast after what the stream that is current at the launch has
            been given: on the caller's, the next payload would wait for the kernels that read the
            one before.
    """

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self.group: Group | None = None
        self.join: Join | None = None
        self._flights: list[Broadcast] = []
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self.group = self.join = None  # groups are kept: see below
        self._flights = []

    def broadcast(self, tensor: Tensor, timeout_s: float) -> Broadcast:
        """Launch a broadcast of `tensor`, uint8[n], over the group."""
        assert self.group is not None
        flight = Broadcast(self.group, tensor, self.stream, timeout_s)
        self._flights = [other for other in self._flights if not other.is_done()] + [flight]
        return flight

    def finish(self, limit_s: float) -> None:
        """Let broadcasts under way end, for at most `limit_s`."""
        _ends_within(limit_s, self._flights)

    def leave(self) -> None:
        """Be in no group. What takes its time ends on another thread, if one can start."""
        cut_off = [flight for flight in self._flights if not flight.is_done()]
        groups = [] if self.group is None else [self.group]
        join = self.join
        self.group = self.join = None
        self._flights = []
        if cut_off or join is not None or (groups and self.stream is not None):
            thread = threading.Thread(target=_release, args=(groups, join, cut_off))
            try:
                thread.start()
                return
            except RuntimeError:  # none is left, or the interpreter shuts down
                pass
        _release(groups, join, cut_off)


def _current(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Makes the stream of a GPU current."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _ends_within(limit_s: float, flights: list[Broadcast]) -> bool:
    deadline = deadline_in(limit_s)
    while not all(flight.is_done() for flight in flights):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _release(groups: list[Group], join: Join | None, cut_off: list[Broadcast]) -> None:
    """Abort and free the groups that `groups` and `join` hold the last reference to.

    The memory of the broadcasts that were cut off is kept until nothing can reach it any more.
    """
    if join is not None:
        join.leave()
        join.wait()
        if join.group is not None:
            groups.append(join.group)
            join.group = None
    while groups:
        _abort(groups[-1])
        groups.pop()
    _ends_within(_ABORT_S, cut_off)
    cut_off.clear()


def _abort(group: Group) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _gloo_group(plan: GroupSpec, store: Store, timeout: timedelta) -> Group:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=plan.own_host)]
    group = dist.ProcessGroupGloo(store, plan.rank, plan.size, options)
    return cast("Group", forks.kept_in_children(group))


def _nccl_group(plan: GroupSpec, store: Store) -> Group:
    if plan.rank == 0:
        store.set("id", nccl.unique_id())  # type: ignore[arg-type]  # bytes are taken as they are
    assert plan.stream is not None
    return nccl.Communicator(store.get("id"), plan.rank, plan.size, plan.stream.device)
