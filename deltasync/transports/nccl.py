"""A communicator of NCCL that never blocks its caller, and that can be aborted at any time.

torch's process group cannot be aborted while it connects: it holds a lock as long as that takes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

from deltasync.transports.control.connection import Deadline, Pace, busy_s

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    """As of NCCL 2.14. Later versions have more, and take their defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded. Raises OSError."""
    library = ctypes.CDLL("librccl.so.1" if torch.version.hip else "libnccl.so.2")
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def is_available() -> bool:
    """Whether this machine and this build of torch can run it."""
    try:
        _library()
    except OSError:
        return False
    return torch.cuda.is_available()


def unique_id() -> bytes:
    """What the members of a new communicator have in common. Raises RuntimeError."""
    unique = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique)))
    return bytes(unique)


@functools.cache
def warm_up(device: torch.device) -> None:
    """Do what NCCL does once in a process, before others wait for it. Raises RuntimeError.

    Of a communicator that a member leaves while it connects, NCCL keeps descriptors open in the
    others. So that should not take long.
    """
    alone = Communicator(unique_id(), 0, 1, device)
    while alone.is_busy():
        time.sleep(0.001)
    alone.abort()


class Communicator:
    """Moves bytes from rank 0. It connects before its first broadcast.

    Raises RuntimeError if it cannot begin to connect.
    """

    def __init__(self, unique: bytes, rank: int, size: int, device: torch.device) -> None:
        self._lock = threading.Lock()  # while NCCL is called: nothing may be called after an abort
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        of = _UniqueId.from_buffer_copy(unique)
        with torch.cuda.device(device):
            at = ctypes.byref(self._comm), ctypes.byref(config)
            _check(_library().ncclCommInitRankConfig(at[0], size, of, rank, at[1]))

    def is_busy(self) -> bool:
        """Whether it still connects or launches. Raises RuntimeError if that failed."""
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", ctypes.byref(state))
        _check(state.value)
        return state.value == _IN_PROGRESS

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> Flight:
        """Launch a broadcast of one tensor on the current stream.

        Raises RuntimeError if it fails, is aborted, or does not connect within `opts.timeout`.
        """
        (tensor,) = tensors
        deadline = Deadline(opts.timeout.total_seconds())
        stream = torch.cuda.current_stream(tensor.device)
        at, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        self._settle(deadline)
        on = ctypes.c_void_p(stream.cuda_stream)
        self._call("ncclBroadcast", on, before=(at, at, count, _UINT8, opts.rootRank))
        self._settle(deadline)
        return Flight(self, stream)

    def abort(self) -> None:
        """End what is under way, soon; nothing follows. From any thread, also again."""
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            _library().ncclCommAbort(comm)

    def _call(self, name: str, *after: object, before: tuple[object, ...] = ()) -> None:
        with self._lock:
            if self._comm is None:
                raise RuntimeError("was aborted")
            _check(getattr(_library(), name)(*before, self._comm, *after))

    def _settle(self, deadline: Deadline) -> None:
        """Wait until it has done what it was asked: NCCL does that on a thread of its own."""
        pace = Pace(busy_s("cuda"))
        while self.is_busy():
            if deadline.passed:
                raise RuntimeError("NCCL did not connect in time")
            time.sleep(pace.pause_s(deadline))


class Flight:
    """A broadcast on a stream, as `torch.distributed.Work`."""

    def __init__(self, communicator: Communicator, stream: torch.cuda.Stream) -> None:
        self._communicator, self._stream = communicator, stream
        self._event = stream.record_event()

    def is_completed(self) -> bool:
        """Whether the GPU has done with it. Ends it if a member was lost."""
        is_done: bool = self._event.query()
        if not is_done:
            try:
                self._communicator.is_busy()
            except RuntimeError:
                self._communicator.abort()
        return is_done

    def wait(self) -> None:
        """Let the current stream come after it. Raises RuntimeError if it failed."""
        self._communicator.is_busy()
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)


def _check(result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        said = _library().ncclGetLastError(None) or b""
        raise RuntimeError(f"NCCL error {result}: {said.decode(errors='replace').strip()}")
