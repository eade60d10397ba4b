"""Compiles kernels as far as their types go, which needs no GPU: `python -m tests.delta.compiled`.

Prints what fails. Calls are lists of a module, a kernel's name, and its arguments: a type, or the
value of a constant.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

Call = tuple[str, str, Mapping[str, Any]]
_HOPPER = GPUTarget("cuda", 90, 32)


def failure(call: Call, backend: Any) -> str:
    """What the compiler says of a call; nothing if it compiles."""
    module, name, arguments = call
    kernel = getattr(importlib.import_module(module), name)
    constants = {p.name for p in kernel.params if p.is_constexpr}
    signature = {k: _type(v, is_constant=k in constants) for k, v in arguments.items()}
    values = {k: _constant(v) for k, v in arguments.items() if k in constants}
    context, options = ir.context(), backend.parse_options({})
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    try:
        ASTSource(kernel, signature, values).make_ir(_HOPPER, options, functions, modules, context)
    except Exception as error:  # noqa: BLE001 whatever it is
        return f"{name} {values}: {error!r} {error.__cause__!r}"
    return ""


def _type(value: Any, *, is_constant: bool) -> str:
    if is_constant:
        return "constexpr"
    return value if isinstance(value, str) else "i64" if value >= 1 << 31 else "i32"


def _constant(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    module, _, name = value.rpartition(":")
    return getattr(importlib.import_module(module) if module else tl, name)


def main() -> int:
    backend = make_backend(_HOPPER)
    failures = [one for call in json.load(sys.stdin) if (one := failure(call, backend))]
    print("\n\n".join(failures))  # noqa: T201 a script
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
