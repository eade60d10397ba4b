"""Compiles kernels for a GPU, which needs none: `python -m tests.delta.compiled < CALLS`.

Prints what fails. Calls are lists of a module, a kernel's name, and its arguments: a type, or the
value of a constant.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

Call = tuple[str, str, Mapping[str, Any]]
_HOPPER = GPUTarget("cuda", 90, 32)


def failure(call: Call) -> str:
    """What the compiler says of a call; nothing if it compiles."""
    module, name, arguments = call
    kernel = getattr(importlib.import_module(module), name)
    constants = {p.name for p in kernel.params if p.is_constexpr}
    signature = {k: _type(v, is_constant=k in constants) for k, v in arguments.items()}
    values = {
        k: getattr(tl, v) if isinstance(v, str) else v
        for k, v in arguments.items()
        if k in constants
    }
    try:
        compiled(ASTSource(kernel, signature, values), target=_HOPPER)
    except Exception as error:  # noqa: BLE001 whatever it is
        return f"{name} {values}: {error!r} {error.__cause__!r}"
    return ""


def _type(value: Any, *, is_constant: bool) -> str:
    if is_constant:
        return "constexpr"
    return value if isinstance(value, str) else "i64" if value >= 1 << 31 else "i32"


def main() -> int:
    with ProcessPoolExecutor(2) as pool:
        failures = [one for one in pool.map(failure, json.load(sys.stdin)) if one]
    print("\n\n".join(failures))  # noqa: T201 a script
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
