"""What `cuda_ipc` needs of CUDA: memory with a handle, mapping it, and events between processes.

The calls go to the CUDA runtime that torch has loaded, by ctypes, since torch offers no memory
outside its caching allocator. Every return code is checked.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from deltasync.errors import ConfigError, TransportError, TransportUnavailable

UUID_BYTES = 16
HANDLE_BYTES = 64  # of memory and of events alike: CUDA_IPC_HANDLE_SIZE
_LAZY_ENABLE_PEER_ACCESS = 1  # the only flags that cudaIpcOpenMemHandle takes
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
# What unmapping may say when the exporting process is gone: cudaErrorInvalidValue,
# cudaErrorDeviceUninitialized, cudaErrorMapBufferObjectFailed, cudaErrorInvalidResourceHandle.
_GONE = (1, 201, 205, 400)
_WAY_OUT = (
    "use the collective transport with nccl, or let both processes see both GPUs "
    "(CUDA_VISIBLE_DEVICES) and, in containers, share the host's IPC and PID namespaces "
    "(docker run --ipc=host --pid=host; hostIPC and hostPID in Kubernetes)"
)


class _MemoryHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Runtime:
    """The functions of libcudart that are used here; each acts on the current device."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        pointer, status = ctypes.c_void_p, ctypes.c_int
        to_pointer, to_handle = ctypes.POINTER(pointer), ctypes.POINTER(_MemoryHandle)
        self._malloc = library.cudaMalloc
        self._malloc.argtypes, self._malloc.restype = [to_pointer, ctypes.c_size_t], status
        self._free = library.cudaFree
        self._free.argtypes, self._free.restype = [pointer], status
        self._get = library.cudaIpcGetMemHandle
        self._get.argtypes, self._get.restype = [to_handle, pointer], status
        self._open = library.cudaIpcOpenMemHandle
        self._open.argtypes = [to_pointer, _MemoryHandle, ctypes.c_uint]
        self._open.restype = status
        self._close = library.cudaIpcCloseMemHandle
        self._close.argtypes, self._close.restype = [pointer], status
        self._error_text = library.cudaGetErrorString
        self._error_text.argtypes, self._error_text.restype = [status], ctypes.c_char_p
        self._last_error = library.cudaGetLastError
        self._last_error.argtypes, self._last_error.restype = [], status

    def malloc(self, num_bytes: int) -> int:
        """Address of new memory. Raises TransportError."""
        pointer = ctypes.c_void_p()
        status = self._malloc(ctypes.byref(pointer), num_bytes)
        if status == _OUT_OF_MEMORY:
            self._last_error()
            torch.cuda.empty_cache()  # torch may keep what it does not use
            status = self._malloc(ctypes.byref(pointer), num_bytes)
        if error := self._error(status):
            raise TransportError(f"cudaMalloc of {num_bytes} bytes: {error}")
        return int(pointer.value or 0)

    def free(self, pointer: int) -> None:
        """Raises TransportError."""
        if error := self._error(self._free(pointer)):
            raise TransportError(f"cudaFree: {error}")

    def export(self, pointer: int) -> bytes:
        """The handle of memory from `malloc`. Raises TransportUnavailable."""
        handle = _MemoryHandle()
        if error := self._error(self._get(ctypes.byref(handle), pointer)):
            raise TransportUnavailable(f"cudaIpcGetMemHandle: {error}; {_WAY_OUT}")
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address of another process's memory, mapped here. Raises TransportUnavailable."""
        pointer = ctypes.c_void_p()
        value = _MemoryHandle.from_buffer_copy(handle)
        status = self._open(ctypes.byref(pointer), value, _LAZY_ENABLE_PEER_ACCESS)
        if error := self._error(status):
            raise TransportUnavailable(f"cudaIpcOpenMemHandle: {error}; {_WAY_OUT}")
        return int(pointer.value or 0)

    def close(self, pointer: int) -> None:
        """Unmap, whether the exporting process lives or not. Raises TransportError."""
        status = self._close(pointer)
        error = self._error(status)
        if error and status not in _GONE:
            raise TransportError(f"cudaIpcCloseMemHandle: {error}")

    def _error(self, status: int) -> str | None:
        """What `status` says, or None for success. Takes the error off the thread's record."""
        if status == 0:
            return None
        self._last_error()  # else torch would blame it on its next kernel
        return f"{self._error_text(status).decode()} ({status})"


class IpcEvent:
    """A point on a stream. As with every CUDA call of torch, errors are RuntimeErrors."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def record(self) -> None:
        """Move to the end of the calling thread's current stream."""
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Let the calling thread's current stream go on only from there."""
        self._event.wait(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """Whether that point was reached, or never set. Does not wait."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class Gpu:
    """One GPU of this process.

    Attributes:
        device: With its index.
        uuid: Names the GPU in every process, whatever index it has there.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        """By default the current GPU. Raises TransportUnavailable, ConfigError."""
        if not torch.cuda.is_available():
            raise TransportUnavailable("CUDA IPC needs a GPU; use the shared memory transport")
        wanted = torch.device("cuda" if device is None else device)
        if wanted.type != "cuda":
            raise ConfigError(f"CUDA IPC has no payloads on {wanted}")
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= torch.cuda.device_count():
            raise ConfigError(f"there is no {wanted}: {torch.cuda.device_count()} GPUs are visible")
        self.device = torch.device("cuda", index)
        self.uuid = _uuid(index)
        self._runtime = _runtime()

    def empty(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] of torch's own."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] that can be exported, until it is given to `free`."""
        with torch.cuda.device(self.device):
            return _wrap(self._runtime.malloc(num_bytes), num_bytes, self.device)

    def free(self, memory: Tensor) -> None:
        """Waits for the device."""
        with torch.cuda.device(self.device):
            self._runtime.free(memory.data_ptr())

    def export(self, memory: Tensor) -> bytes:
        """The handle by which other processes map what `allocate` returned."""
        with torch.cuda.device(self.device):
            return self._runtime.export(memory.data_ptr())

    def mark(self) -> IpcEvent:
        return IpcEvent(torch.cuda.Event(), self.device)  # type: ignore[no-untyped-call]

    def exported_mark(self) -> tuple[IpcEvent, bytes]:
        """A mark that other processes may query, and its handle. Raises TransportUnavailable."""
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.device(self.device):
                handle: bytes = event.ipc_handle()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TransportUnavailable(f"{error}; {_WAY_OUT}") from error
        return IpcEvent(event, self.device), handle

    def open(
        self, owner: bytes, memory: bytes, event: bytes, num_bytes: int
    ) -> tuple[Tensor, IpcEvent]:
        """uint8[num_bytes] and the mark that another process exported, on the GPU `owner`.

        Mapped until given to `close`. Raises TransportUnavailable.
        """
        device = _find(owner)
        with torch.cuda.device(device):
            pointer = self._runtime.open(memory)
            try:
                opened = torch.cuda.Event.from_ipc_handle(device, event)  # type: ignore[no-untyped-call]
                return _wrap(pointer, num_bytes, device), IpcEvent(opened, device)
            except RuntimeError as error:
                self._runtime.close(pointer)
                raise TransportUnavailable(f"{error}; {_WAY_OUT}") from error

    def close(self, memory: Tensor) -> None:
        """Unmap what `open` returned."""
        with torch.cuda.device(memory.device):
            self._runtime.close(memory.data_ptr())

    def is_near(self, memory: Tensor) -> bool:
        """Whether it is this GPU's memory."""
        return memory.device == self.device

    def synchronize(self, memory: Tensor) -> None:
        """Wait until nothing reads or writes it on behalf of this process."""
        torch.cuda.synchronize(memory.device)


class _Array:
    """Memory as torch takes it from others."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _wrap(pointer: int, num_bytes: int, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(_Array(pointer, num_bytes), device=device)
    if tensor.data_ptr() != pointer or tensor.device != device:  # torch copies across devices
        raise RuntimeError(f"the memory at {pointer:#x} is not on {device}")
    return tensor


def _uuid(index: int) -> bytes:
    return uuid.UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes


def _find(owner: bytes) -> torch.device:
    """The GPU of that UUID. Raises TransportUnavailable."""
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == owner:
            return torch.device("cuda", index)
    name = uuid.UUID(bytes=owner)
    raise TransportUnavailable(f"the sender's GPU {name} is not visible here; {_WAY_OUT}")


@functools.cache
def _runtime() -> _Runtime:
    """The CUDA runtime that torch uses, once it has loaded it. Raises TransportUnavailable."""
    path = find_runtime(Path("/proc/self/maps").read_text().splitlines(), torch.version.cuda)
    if path is None:
        raise TransportUnavailable(f"this torch brings no libcudart to share memory by; {_WAY_OUT}")
    return _Runtime(path)


def find_runtime(maps: Iterable[str], version: str | None) -> str | None:
    """Path of the libcudart among the mapped files `maps`, of torch's `version` if there are more.

    Args:
        maps: Lines of /proc/self/maps.
        version: "13.0", say.
    """
    fields = [line.split(maxsplit=5) for line in maps]
    paths = {parts[5] for parts in fields if len(parts) == 6}
    found = sorted(path for path in paths if path.rpartition("/")[2].startswith("libcudart"))
    major = f".so.{version.partition('.')[0]}" if version else ""
    return next((path for path in found if major in path), found[0] if found else None)
