"""Communicators of NCCL that never block, and that can be aborted while they connect.

torch's process group cannot be aborted then: it holds a lock for as long as connecting takes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from deltasync.errors import TransportUnavailable
from deltasync.transports.control.connection import Pace, busy_s, deadline_in
from deltasync.transports.marks import Mark

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
# ncclConfig_t of NCCL 2.14: its size in two words, what marks it, the version, and whether calls
# block. What later versions have besides takes its defaults.
_CONFIG = 24, 0, 0xCAFEBEEF, 21400, 0, 0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


@functools.cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded. Raises OSError."""
    library = ctypes.CDLL("librccl.so.1" if torch.version.hip else "libnccl.so.2")
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library


def unique_id() -> bytes:
    """What the members of a new communicator have in common. Raises RuntimeError."""
    unique = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique)))
    return bytes(unique)


@functools.cache
def warm_up(device: torch.device) -> None:
    """Do what NCCL does once in a process, before others wait for it.

    Raises TransportUnavailable.
    """
    try:
        alone = Communicator(unique_id(), 0, 1, torch.cuda.current_stream(device))
        while alone.is_busy():
            time.sleep(0.001)
        alone.abort()
    except (OSError, RuntimeError) as error:
        raise TransportUnavailable(f"NCCL cannot start here: {error}") from error


class Communicator:
    """Moves bytes from rank 0, on a stream on which nothing else runs. It connects by itself.

    Raises RuntimeError if it cannot begin to connect.
    """

    def __init__(self, unique: bytes, rank: int, size: int, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._lock = threading.Lock()  # while NCCL is called: nothing may be called after an abort
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        self._why_aborted = ""
        self._last: Flight | None = None
        of, config = _UniqueId.from_buffer_copy(unique), (ctypes.c_uint * len(_CONFIG))(*_CONFIG)
        with torch.cuda.device(stream.device):
            self._call(
                lambda comm: _library().ncclCommInitRankConfig(
                    ctypes.byref(comm), size, of, rank, ctypes.byref(config)
                )
            )

    def is_busy(self) -> bool:
        """Whether it still connects or launches. Raises RuntimeError once it failed or ended."""
        state = ctypes.c_int()
        self._call(lambda comm: _library().ncclCommGetAsyncError(comm, ctypes.byref(state)))
        return _check(state.value) == _IN_PROGRESS

    def broadcast(self, tensor: Tensor, timeout_s: float, after: Mark | None = None) -> Flight:
        """Wait until it is connected, and begin to broadcast a tensor, but not before `after`.

        The one before it need not be over, nor known to be.
        Raises RuntimeError if it fails, is aborted, or does not connect within `timeout_s`.
        """
        deadline, pace = deadline_in(timeout_s), Pace(busy_s("cuda"))
        while self.is_busy():
            if time.monotonic() >= deadline:
                raise RuntimeError("NCCL did not connect in time")
            time.sleep(pace.pause_s(deadline))
        if self._last is not None:
            self._last.mark()
        at, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        on = ctypes.c_void_p(self.stream.cuda_stream)
        with torch.cuda.device(self.stream.device):
            if after is not None:
                after.wait(self.stream)
            self._call(lambda comm: _library().ncclBroadcast(at, at, count, _UINT8, 0, comm, on))
        self._last = Flight(self)
        return self._last

    def abort(self, why: str = "was aborted") -> None:
        """End what is under way, soon; nothing follows. From any thread, also again."""
        with self._lock:
            comm, self._comm = self._comm, None
            self._why_aborted = self._why_aborted or why
        if comm is not None:
            _library().ncclCommAbort(comm)

    def _call(self, call: Callable[[ctypes.c_void_p], int]) -> None:
        with self._lock:
            if self._comm is None:
                raise RuntimeError(self._why_aborted)
            _check(call(self._comm))


class Flight:
    """A broadcast that NCCL launches on a thread of its own."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._event: torch.cuda.Event | None = None
        self._error: RuntimeError | None = None

    def mark(self) -> torch.cuda.Event:
        """When it is done: all that the stream was given before the first call of this.

        That is once the broadcast is launched, and before anything else is.
        """
        self._event = self._event or self._communicator.stream.record_event()
        return self._event

    def is_completed(self) -> bool:
        """Whether the GPU has done with its memory. Aborts the communicator if that has failed."""
        try:
            if self._communicator.is_busy():
                return False
        except RuntimeError as error:
            self._error = error
            self._communicator.abort(str(error))
        return bool(self.mark().query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Raise RuntimeError if it has failed."""
        if self._error is not None:
            raise self._error


def _check(result: int) -> int:
    if result not in (_SUCCESS, _IN_PROGRESS):
        said = _library().ncclGetLastError(None) or b""
        raise RuntimeError(f"NCCL error {result}: {said.decode(errors='replace').strip()}")
    return result
