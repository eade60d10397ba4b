"""Stands in for torchvision, whose builds want CUDA: it is only named, at import."""

import sys
from types import ModuleType


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


__version__ = "0.28.0"
__path__: list[str] = []
for _name in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    sys.modules[f"{__name__}.{_name}"] = _Module(f"{__name__}.{_name}")
