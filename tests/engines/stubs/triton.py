"""Stands in for triton, which is large: on a CPU SGLang declares kernels and calls none."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

__version__ = "3.7.0"


class _Anything:
    """Decorates, and is a base, an annotation, a namespace."""

    def __init__(self, *_args, **_options):
        pass

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__") or name == "active":  # no driver is
            raise AttributeError(name)
        return self


def _attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Anything,), {}) if name[0].isupper() else _Anything()


class _Module(ModuleType):
    __path__ = []
    __getattr__ = staticmethod(_attribute)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


__path__ = []
__getattr__ = _attribute
sys.meta_path.insert(0, _Finder())
