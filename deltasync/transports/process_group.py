"""Process groups of our own: formed, used and left without blocking the caller.

The only file that knows how gloo and NCCL differ. Whatever a back end blocks in runs on a thread
that ends with the timeout it was given; the interpreter waits for it before it exits, because a
thread that returns from a back end into an interpreter that is gone would crash the process.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from deltasync.errors import ConfigError, TransportUnavailable
from deltasync.transports.base import Capabilities
from deltasync.transports.endpoints import listen_tcp

Backend = Literal["gloo", "nccl"]


class Group(Protocol):
    """What is used of a process group."""

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> dist.Work: ...

    def abort(self) -> None: ...


_MAX_TIMEOUT_S = 24 * 3600.0
_MIN_TIMEOUT_S = 0.01
_POLL_S = 0.0005


def bounded(timeout_s: float) -> float:
    """A timeout as back ends take it: neither zero nor endless, whatever arrived."""
    if math.isnan(timeout_s):
        return _MIN_TIMEOUT_S
    return min(max(timeout_s, _MIN_TIMEOUT_S), _MAX_TIMEOUT_S)


def device_of(backend: Backend, device: torch.device | str | None) -> torch.device:
    """The device payloads live on. Raises TransportUnavailable, ConfigError."""
    if backend == "gloo":
        available, type_ = dist.is_gloo_available(), "cpu"
    elif backend == "nccl":
        available, type_ = dist.is_nccl_available() and torch.cuda.is_available(), "cuda"
    else:
        raise ConfigError(f"unknown backend {backend!r}; known are gloo and nccl")
    if not available:
        raise TransportUnavailable(f"this machine or this build of torch cannot run {backend}")
    if device is None:
        device = type_ if type_ == "cpu" else f"cuda:{torch.cuda.current_device()}"
    if torch.device(device).type != type_:
        raise ConfigError(f"{backend} moves payloads on {type_}, not on {device}")
    return torch.device(device)


def capabilities_of(device: torch.device, max_payload_bytes: int) -> Capabilities:
    """What a broadcast between `device`s can do."""
    return Capabilities(
        devices=(device.type,),
        max_payload_bytes=max_payload_bytes,
        zero_copy=True,
        detects_loss=True,
    )


def serve_store(host: str) -> tuple[int, TCPStore]:
    """A rendezvous store on a free port of `host` alone, and that port."""
    listener = listen_tcp(host, 0)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return port, store


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which group to form, and as whom.

    Attributes:
        backend: gloo or nccl.
        device: Where payloads live.
        store_host: Where the sender serves the rendezvous store.
        store_port: Its port.
        name: Of the group; prefixes its keys.
        rank: Our own; the sender is 0.
        size: Number of members.
        timeout_s: After which forming the group gives up.
        own_host: Our address on the network that leads to the sender.
    """

    backend: Backend
    device: torch.device
    store_host: str
    store_port: int
    name: str
    rank: int
    size: int
    timeout_s: float
    own_host: str

    def form(self) -> Group:
        """Form the group and prove it by a first broadcast. Blocks; raises RuntimeError."""
        timeout = timedelta(seconds=self.timeout_s)
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
        if self.backend == "nccl":
            group = _nccl_group(self, store)
        else:
            group = _gloo_group(self, store, timeout)
        first = Broadcast(
            group, torch.zeros(1, dtype=torch.uint8, device=self.device), self.timeout_s
        )
        give_up = time.monotonic() + self.timeout_s
        while not first.is_done() and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        if not first.is_done() or first.error is not None:
            _release([group])
            raise RuntimeError(first.error or "the first broadcast did not end in time")
        return group


class Join:
    """Forms a group on a thread of its own, since back ends block while they connect.

    Attributes:
        group: The group once done, if there is no error.
        error: Why there is none.
    """

    def __init__(self, plan: Plan) -> None:
        self.group: Group | None = None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, args=(plan,))
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self, plan: Plan) -> None:
        try:
            self.group = plan.form()
        except RuntimeError as error:
            self.error = str(error)
        finally:
            if self.group is None:
                self.error = self.error or "the group could not be formed"


class Broadcast:
    """One broadcast from rank 0 that is polled, never waited for.

    Attributes:
        error: Why it failed, once it is done.
    """

    def __init__(self, group: Group, tensor: Tensor, timeout_s: float) -> None:
        """Start to broadcast uint8[n]; `tensor` stays in use until done, or for good if left."""
        self.error: str | None = None
        self._work: dist.Work | None = None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        if tensor.device.type == "cpu":
            # Ends the back end's own part in time. Not for NCCL, whose watchdog would take
            # the process down with it.
            options.timeout = timedelta(seconds=timeout_s)
        try:
            self._work = group.broadcast([tensor], options)
        except RuntimeError as error:
            self.error = str(error)

    def is_done(self) -> bool:
        if self._work is not None and self._work.is_completed():
            try:
                # Complete, so this does not block; on GPUs it orders the current stream.
                self._work.wait()
            except RuntimeError as error:
                self.error = str(error)
            self._work = None
        return self._work is None


class Membership:
    """The group an end is in, and the job that runs inside the back end."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.job: Join | Broadcast | None = None

    def leave(self) -> bool:
        """Be in no group. Never blocks. Returns whether a job was cut off."""
        cut_off = self.job is not None and not self.job.is_done()
        groups = [] if self.group is None else [self.group]
        self.group = self.job = None
        if cut_off:
            threading.Thread(target=_release, args=(groups,)).start()
        else:
            _release(groups)
        return cut_off


def _release(groups: list[Group]) -> None:
    """Abort and free the group that `groups` holds the last reference to."""
    while groups:
        groups[-1].abort()
        groups.pop()


def _gloo_group(plan: Plan, store: Store, timeout: timedelta) -> Group:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=plan.own_host)]
    group = dist.ProcessGroupGloo(store, plan.rank, plan.size, options)
    return cast("Group", group)


def _nccl_group(plan: Plan, store: Store) -> Group:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_MAX_TIMEOUT_S)
    with torch.cuda.device(plan.device):
        group = dist.ProcessGroupNCCL(store, plan.rank, plan.size, options)
    return cast("Group", group)
