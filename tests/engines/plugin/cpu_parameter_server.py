"""checkpoint-engine on CPUs, for tests: its own code at both ends, over memory of the host."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 1 << 20


class Devices:
    """Stands in for checkpoint-engine's DeviceManager, which knows GPUs only."""

    device_type, backend = "cpu", "gloo"
    device_module = SimpleNamespace(
        device_count=lambda: 1,
        empty_cache=lambda: None,
        get_device_properties=lambda _: SimpleNamespace(uuid=os.environ["TESTED_DEVICE"]),
        ipc_collect=lambda: None,
        mem_get_info=lambda: (BUCKET_BYTES * 3, BUCKET_BYTES * 3),
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        set_device=lambda _: None,
        synchronize=lambda: None,
    )


def let_sglang_receive() -> None:
    """A plugin of SGLang's: its workers are on a CPU that passes for a device."""
    if "TESTED_DEVICE" not in os.environ:
        return
    import checkpoint_engine.worker
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from deltasync.integrations.checkpoint_engine import _CLASS, _MODULE

    checkpoint_engine.worker.DeviceManager = Devices
    uuid = f"GPU-{os.environ['TESTED_DEVICE']}"
    HookRegistry.register(f"{_MODULE}.{_CLASS}.get_device_uuid", lambda _: uuid, HookType.REPLACE)
    HookRegistry.register(f"{_MODULE}.{_CLASS}.get_device_id", lambda _: None, HookType.REPLACE)


def let_vllm_receive() -> None:
    """Its workers, in this process, are on a CPU that passes for a device."""
    import checkpoint_engine.worker

    checkpoint_engine.worker.DeviceManager = Devices
    uuid = f"GPU-{os.environ['TESTED_DEVICE']}"
    checkpoint_engine.worker.VllmColocateWorkerExtension._device_uuid = uuid


def let_parameter_servers_send() -> None:
    """Those of this process."""
    import checkpoint_engine.pin_memory
    import checkpoint_engine.ps

    checkpoint_engine.ps.DeviceManager = Devices
    checkpoint_engine.ps.reduce_tensor = share
    checkpoint_engine.pin_memory.torch = _Torch("torch")


def share(buffer: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """As reduce_tensor shares memory of GPUs."""
    return rebuild, buffer.untyped_storage()._share_filename_cpu_()


def rebuild(*shared: Any) -> Tensor:
    """The same memory at the other end."""
    storage = torch.UntypedStorage._new_shared_filename_cpu(*shared)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Torch(ModuleType):
    """Without memory that is pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*size, **options)
