"""NIXL as the transport uses it: memory that is registered, and reads of another agent's memory.

The only file that calls the library. Descriptors and requests are those of NIXL's core: the
functions of its Python layer that serialize descriptors unpickle what arrives, so they are not
used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasync.errors import ConfigError, PeerLost, TransportUnavailable
from deltasync.transports import forks

MEMORY_TYPES = ("cpu", "cuda")  # their places are what travels
logger = logging.getLogger(__name__)
_UNREADABLE = "the sender's memory cannot be read"
_INSTEAD = "or use the collective transport"
# How often the thread that serves reads looks for work that nothing woke it for. At NIXL's
# default, 0, it never sleeps.
_IDLE_US = 10_000


def load_library() -> Any:
    """Import NIXL. Raises TransportUnavailable."""
    try:
        import nixl
    except (ImportError, OSError) as error:
        raise TransportUnavailable(
            f"NIXL cannot be imported: {error}; pip install nixl, {_INSTEAD}"
        ) from error
    if not hasattr(nixl, "nixlAgent"):
        raise TransportUnavailable(f"this NIXL is too old: install nixl>=1.5, {_INSTEAD}")
    return nixl


def device_of(device: torch.device | str | None) -> torch.device:
    """The device payloads live on, by default the CPU. Raises ConfigError."""
    found = torch.device("cpu" if device is None else device)
    if found.type not in MEMORY_TYPES:
        raise ConfigError(f"NIXL moves payloads on {', '.join(MEMORY_TYPES)}, not on {device}")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a process, as another one names them.

    Attributes:
        memory_type: Index in `MEMORY_TYPES`.
        device: Number of the GPU in that process, 0 for host memory.
        address: Of the first byte.
    """

    memory_type: int
    device: int
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Of the first byte of `tensor`."""
        return cls(
            MEMORY_TYPES.index(tensor.device.type), tensor.device.index or 0, tensor.data_ptr()
        )

    def after(self, num_bytes: int) -> Place:
        """`num_bytes` further on."""
        return Place(self.memory_type, self.device, self.address + num_bytes)


class Agent:
    """One NIXL agent on UCX. Not thread-safe: its owner holds the gate."""

    def __init__(self, device: torch.device, *, serves: bool) -> None:
        """Make an agent for memory on `device`.

        Args:
            device: A CPU or GPU.
            serves: Others read from here, for which a thread runs where the network cannot do it.
                An agent that only reads does so within its calls.

        Raises TransportUnavailable.
        """
        self._nixl = load_library()
        self._errors = _errors_of(self._nixl)
        self._types = self._nixl.DRAM_SEG, self._nixl.VRAM_SEG
        torch.empty(1, device=device)  # UCX looks for the context of a GPU
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _IDLE_US
        try:
            name = f"deltasync-{secrets.token_hex(8)}"
            self._native = forks.kept_in_children(self._nixl.nixlAgent(name, config))
            self._ucx = self._native.createBackend("UCX", {})
        except self._errors as error:
            raise TransportUnavailable(
                f"NIXL cannot use UCX here: {error}; UCX_LOG_LEVEL=info says why, {_INSTEAD}"
            ) from error
        self._reads: set[int] = set()
        _warn_of_ports()

    def register(self, memory: Tensor) -> object:
        """Pin `memory`, uint8[n], for reads from it or into it. Returns what stands for that.

        The caller keeps it alive until it has been unregistered, or the agent was closed.
        Raises TransportUnavailable.
        """
        place = Place.of(memory)
        entry = (place.address, memory.numel(), place.device, "")
        descriptors = self._nixl.nixlRegDList(self._types[place.memory_type], [entry])
        try:
            self._native.registerMem(descriptors, [self._ucx])
        except self._errors as error:
            raise TransportUnavailable(
                f"NIXL cannot register {memory.numel()} bytes on {memory.device}: {error}; "
                f"RDMA needs `ulimit -l unlimited`, {_INSTEAD}"
            ) from error
        return descriptors

    def unregister(self, registered: object) -> None:
        """Unpin memory that nothing reads or writes any more."""
        with contextlib.suppress(*self._errors):
            self._native.deregisterMem(registered, [self._ucx])

    def describe(self, registered: object) -> bytes:
        """What another agent must know to read registered memory. Secret: it is the right to."""
        return bytes(self._native.getLocalPartialMD(registered, True, [self._ucx]))

    def meet(self, description: bytes) -> str:
        """Take in what `describe` said there. Returns the other agent's name; raises PeerLost."""
        with self._losing("memory that NIXL cannot use"):
            return str(self._native.loadRemoteMD(description).decode())

    def read(self, other: str, place: Place, into: Tensor) -> int:
        """Start to read into `into`, uint8[n] of registered memory: see `is_done`.

        Raises PeerLost.
        """
        here, num_bytes = Place.of(into), into.numel()
        local, remote = self._list(here, num_bytes), self._list(place, num_bytes)
        with self._losing(_UNREADABLE):
            request: int = self._native.createXferReq(
                self._nixl.NIXL_READ, local, remote, other, "", [self._ucx]
            )
            self._reads.add(request)
            self._native.postXferReq(request)
        return request

    def is_done(self, read: int) -> bool:
        """Whether all bytes are here; works on it. Raises PeerLost if they do not come."""
        with self._losing(_UNREADABLE):
            is_done = bool(self._native.getXferStatus(read) == self._nixl.NIXL_SUCCESS)
        if is_done:
            self._release(read)
        return is_done

    def _release(self, read: int) -> None:
        """Forget a read, or cancel it."""
        self._reads.remove(read)
        with contextlib.suppress(*self._errors):
            self._native.releaseXferReq(read)

    def close(self) -> None:
        """End all reads, connections and registrations: nothing is read or written after it."""
        for read in list(self._reads):
            self._release(read)
        self._ucx = self._native = None

    @contextlib.contextmanager
    def _losing(self, what: str) -> Iterator[None]:
        """Raise PeerLost for errors of the library."""
        try:
            yield
        except self._errors as error:
            raise PeerLost(f"{what}: {error}") from error

    def _list(self, place: Place, num_bytes: int) -> object:
        entry = (place.address, num_bytes, place.device)
        return self._nixl.nixlXferDList(self._types[place.memory_type], [entry])


def _errors_of(library: Any) -> tuple[type[Exception], ...]:
    """The exceptions of NIXL, which have no base of their own; ValueError for what is no text."""
    found = [value for name, value in vars(library).items() if name.endswith("Error")]
    own = [one for one in found if isinstance(one, type) and issubclass(one, Exception)]
    return *own, ValueError


@functools.cache
def _warn_of_ports() -> None:
    """Log once what no option of ours can close."""
    logger.warning(
        "UCX listens on every network of this host, and serves whoever connects: over TCP they "
        "can read and write the memory of this process. Set UCX_NET_DEVICES to the network "
        "of the other end, and let nobody else reach it"
    )
