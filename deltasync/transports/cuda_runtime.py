"""What `cuda_ipc` needs of CUDA: memory with a handle, mapping it, and events between processes.

The calls go to the CUDA runtime that torch has loaded, by ctypes, since torch offers no memory
outside its caching allocator. Every return code is checked.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from types import SimpleNamespace

import torch
from torch import Tensor

from deltasync.errors import ConfigError, TransportError, TransportUnavailable
from deltasync.transports.marks import Mark

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
        _library()

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] that can be exported, until it is given to `free`."""
        pointer, size = ctypes.c_void_p(), ctypes.c_size_t(num_bytes)
        with torch.cuda.device(self.device):
            status = _call("cudaMalloc", ctypes.byref(pointer), size)
            if status == _OUT_OF_MEMORY:
                torch.cuda.empty_cache()  # torch may keep what it does not use
                status = _call("cudaMalloc", ctypes.byref(pointer), size)
            if status:
                raise TransportError(f"cudaMalloc of {num_bytes} bytes: {_text(status)}")
            return _wrap(pointer, num_bytes, self.device)

    def free(self, memory: Tensor) -> None:
        """Waits for the device. Raises TransportError."""
        with torch.cuda.device(self.device):
            if status := _call("cudaFree", ctypes.c_void_p(memory.data_ptr())):
                raise TransportError(f"cudaFree: {_text(status)}")

    def export(self, memory: Tensor) -> bytes:
        """The handle by which other processes map what `allocate` returned."""
        handle, pointer = _MemoryHandle(), ctypes.c_void_p(memory.data_ptr())
        with torch.cuda.device(self.device):
            if status := _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer):
                raise TransportUnavailable(f"cudaIpcGetMemHandle: {_text(status)}; {_WAY_OUT}")
        return bytes(handle)

    def exported_mark(self) -> tuple[Mark, bytes]:
        """A mark that other processes may ask for, and its handle. Raises TransportUnavailable."""
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.device(self.device):
                handle: bytes = event.ipc_handle()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TransportUnavailable(f"{error}; {_WAY_OUT}") from error
        return Mark(self.device, event), handle

    def open(
        self, owner: bytes, memory: bytes, event: bytes, num_bytes: int
    ) -> tuple[Tensor, Mark]:
        """uint8[num_bytes] and the mark that another process exported, on the GPU `owner`.

        Mapped until given to `close`, whether that process lives or not.
        Raises TransportUnavailable.
        """
        device, pointer = _find(owner), ctypes.c_void_p()
        handle = _MemoryHandle.from_buffer_copy(memory)
        flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        with torch.cuda.device(device):
            if status := _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, flags):
                raise TransportUnavailable(f"cudaIpcOpenMemHandle: {_text(status)}; {_WAY_OUT}")
            try:
                opened = torch.cuda.Event.from_ipc_handle(device, event)  # type: ignore[no-untyped-call]
                return _wrap(pointer, num_bytes, device), Mark(device, opened)
            except RuntimeError as error:
                _call("cudaIpcCloseMemHandle", pointer)
                raise TransportUnavailable(f"{error}; {_WAY_OUT}") from error

    def close(self, memory: Tensor) -> None:
        """Unmap what `open` returned. Raises TransportError."""
        with torch.cuda.device(memory.device):
            status = _call("cudaIpcCloseMemHandle", ctypes.c_void_p(memory.data_ptr()))
        if status and status not in _GONE:
            raise TransportError(f"cudaIpcCloseMemHandle: {_text(status)}")


def _wrap(at: ctypes.c_void_p, num_bytes: int, device: torch.device) -> Tensor:
    """uint8[num_bytes] of memory that is not torch's."""
    pointer = at.value or 0
    interface = {
        "shape": (num_bytes,),
        "typestr": "|u1",
        "data": (pointer, False),
        "strides": None,
        "version": 3,
    }
    tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
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
def _library() -> ctypes.CDLL:
    """The CUDA runtime that torch uses, once it has loaded it. Raises TransportUnavailable."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        why = f"this torch brings no libcudart to share memory by: {error}"
        raise TransportUnavailable(f"{why}; {_WAY_OUT}") from error
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: object) -> int:
    """Call a function for the current device. Returns 0, or its error."""
    status = int(getattr(_library(), name)(*arguments))
    if status:
        _library().cudaGetLastError()  # else torch would blame it on its next kernel
    return status


def _text(status: int) -> str:
    return f"{_library().cudaGetErrorString(status).decode()} ({status})"
