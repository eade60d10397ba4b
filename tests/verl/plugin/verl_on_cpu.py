"""verl's platform for a host without GPUs, where Ray was told of some: VERL_USE_EXTERNAL_MODULES.

verl takes such a host for one of NVIDIA, and hands tensors over through CUDA.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class _Nothing(ModuleType):
    """`torch.cuda` of a host that has none, with nothing to wait for or to free."""

    def __getattr__(self, name: str) -> Any:
        if name in ("synchronize", "empty_cache", "ipc_collect"):
            return lambda *_: None
        return getattr(torch.cuda, name)


class PlatformCpu(PlatformCUDA):  # type: ignore[misc]  # verl has no types
    @property
    def device_module(self) -> ModuleType:
        return _Nothing("cuda")

    def is_available(self) -> bool:
        return True

    def is_ipc_supported(self) -> bool:
        return False


set_platform(PlatformCpu())
