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
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from deltasync.errors import ConfigError, TransportUnavailable
from deltasync.transports import forks, nccl
from deltasync.transports.control.connection import deadline_in, left_s
from deltasync.transports.control.tcp import listen_tcp
from deltasync.transports.marks import Mark

# A string: there are builds of torch without gloo.
Group: TypeAlias = "dist.ProcessGroupGloo | nccl.Communicator"

_MAX_TIMEOUT_S = 24 * 3600.0
_MIN_TIMEOUT_S = 0.01
_POLL_S = 0.0005
_MEET_S = 0.0005  # times the number of members, which all ask the store of one
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

    def abandon(self) -> None:
        """Give up the memory if a broadcast still reads or writes it."""
        if self.flight is not None and not self.flight.is_done():
            self._memory = self._memory.new_empty(0)
        self.flight = None


class Join:
    """Forms a group on a thread of its own, since back ends block while they connect.

    Attributes:
        group: The group once done, if there is no error.
        error: Why there is none.
    """

    def __init__(
        self,
        backend: str,
        stream: torch.cuda.Stream | None,
        store: tuple[str, int],
        name: str,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        own_host: str,
    ) -> None:
        """Begin.

        Args:
            backend: "gloo" or "nccl".
            stream: See `Membership`.
            store: Host and port of the rendezvous store.
            name: Of the group; prefixes its keys.
            rank: Our own; the sender is 0.
            size: Number of members.
            timeout_s: After which forming the group gives up.
            own_host: Our address on the network that leads to the sender.
        """
        self.group: Group | None = None
        self.error: str | None = None
        self._backend, self._stream, self._store, self._name = backend, stream, store, name
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._own_host = own_host
        self._is_left = False
        self._thread = threading.Thread(target=self._run)
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
        """Until done: at most for the timeout."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        error: str | None = "the group could not be formed"
        try:
            self.group = self._form()
            error = None
        except RuntimeError as raised:
            error = f"{raised}{_WAY_OUT.get(self._backend, '')}"
        finally:
            self.error = error

    def _form(self) -> Group | None:
        """Form the group and prove it by a first broadcast; None if it is left meanwhile.

        Blocks; raises RuntimeError.
        """
        deadline, timeout = deadline_in(self._timeout_s), timedelta(seconds=self._timeout_s)
        # A connection of its own: one that waits for keys in vain would block the next one.
        tcp = TCPStore(*self._store, None, is_master=False, timeout=timeout, wait_for_workers=False)
        store = PrefixStore(self._name, tcp)
        if not self._meets(store, deadline):
            return None
        group: Group
        if self._stream is not None:
            group = nccl.Communicator(store.get("go"), self._rank, self._size, self._stream)
        else:
            group = self._gloo_group(store, timeout)
        if self._is_left:
            _abort(group)
            return None
        device = self._stream.device if self._stream else torch.device("cpu")
        first = Broadcast(torch.empty(1, dtype=torch.uint8, device=device))
        first.start(group, bounded(left_s(deadline)))
        if not _ends_within(left_s(deadline), [first]) or first.error is not None:
            error = first.error or "the first broadcast did not end in time"
            groups = [group]
            del group
            _release(groups, None, [first])
            raise RuntimeError(error)
        return group

    def _meets(self, store: Store, deadline: float) -> bool:
        """Whether all members have come, and rank 0 let them begin, before this is left.

        Back ends wait long for a member that does not come, and NCCL for ever. Of a communicator
        that loses a member as it begins, NCCL closes nothing in the others. So rank 0, which hears
        of losses, does not let it begin once it knows of one.
        """
        awaited = ["go"] if self._rank else [f"here/{rank}" for rank in range(1, self._size)]
        store.set(f"here/{self._rank}", "")
        while not self._is_left and not store.check(awaited):
            if time.monotonic() >= deadline:
                raise RuntimeError("not all members came in time")
            time.sleep(_MEET_S * self._size)
        if not self._is_left and self._rank == 0:  # bytes are taken as they are
            store.set("go", nccl.unique_id() if self._stream is not None else "")  # type: ignore[arg-type]
        return not self._is_left

    def _gloo_group(self, store: Store, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_host)]
        group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        return forks.kept_in_children(group)


class Broadcast:
    """One broadcast from rank 0 that is polled, never waited for.

    Attributes:
        error: Why it failed, once it is done.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Of uint8[n], which stays in use until done, or for good if left."""
        self.error: str | None = None
        self._tensor: Tensor | None = tensor
        self._work: dist.Work | nccl.Flight | None = None

    def start(self, group: Group, timeout_s: float, after: Mark | None = None) -> None:
        """Launch it, to run on a GPU not before `after`. If that is interrupted, it never ends."""
        tensor = self._tensor
        assert tensor is not None
        try:
            if isinstance(group, nccl.Communicator):
                self._work = group.broadcast(tensor, timeout_s, after)
            else:
                options = dist.BroadcastOptions()  # from rank 0, and not waited for
                options.timeout = timedelta(seconds=timeout_s)
                self._work = group.broadcast([tensor], options)  # type: ignore[attr-defined]
        except RuntimeError as error:
            self._end(str(error))

    def forked(self) -> None:
        """What it waits for runs in the parent, and its end would wait for a thread of there."""
        forks.keep(self._work)
        self._end(forks.PARENTS_OWN)

    def is_done(self) -> bool:
        """Whether it has ended: whatever is launched from now on comes after it."""
        if self._work is not None and self._work.is_completed():
            try:
                self._work.wait()  # complete, so this does not block
                self._end()
            except RuntimeError as error:
                self._end(str(error))
        return self._tensor is None

    def _end(self, error: str | None = None) -> None:
        self.error, self._work, self._tensor = error, None, None


class Membership:
    """The group an end is in, its buffers, and what runs inside the back end.

    Attributes:
        slots: The buffers.
        group: The group, or None. Hold no other reference: dropping the last one can block.
        join: The group that is being formed.
        stream: Where broadcasts are launched: on a GPU one of their own, on which nothing else
            runs. On the caller's, the next payload would wait for the kernels that read the one
            before.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        is_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self.slots = tuple(PayloadBuffer(device) for _ in range(num_slots))
        self.group: Group | None = None
        self.join: Join | None = None
        forks.inert_in_children(self._forked)

    def _forked(self) -> None:
        self.group = self.join = None  # groups are kept
        for flight in self.flights:
            flight.forked()

    @property
    def flights(self) -> list[Broadcast]:
        """Broadcasts that are not known to have ended well."""
        return [slot.flight for slot in self.slots if slot.flight is not None]

    def broadcast(
        self, slot: PayloadBuffer, payload: Tensor, timeout_s: float, after: Mark | None = None
    ) -> None:
        """Launch the broadcast of a payload, which lies in `slot`, over the group."""
        assert self.group is not None
        slot.flight = Broadcast(payload)
        slot.flight.start(self.group, timeout_s, after)

    def finish(self, limit_s: float) -> None:
        """Let broadcasts under way end, for at most `limit_s`."""
        _ends_within(limit_s, self.flights)

    def leave(self) -> None:
        """Be in no group. What takes its time ends on another thread, if one can start."""
        cut_off = [flight for flight in self.flights if not flight.is_done()]
        groups = [] if self.group is None else [self.group]
        join = self.join
        self.group = self.join = None
        for slot in self.slots:
            slot.abandon()
        if cut_off or join is not None or (groups and self.stream is not None):
            thread = threading.Thread(target=_release, args=(groups, join, cut_off))
            try:
                thread.start()
                return
            except RuntimeError:  # none is left, or the interpreter shuts down
                pass
        _release(groups, join, cut_off)


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
