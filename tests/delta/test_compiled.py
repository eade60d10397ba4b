"""What Triton's interpreter runs compiles for GPUs: the interpreter finds no errors of types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.language import dtype as TritonType
from triton.runtime.interpreter import InterpretedFunction

from deltasync.delta.batched.warm_up import sync_tiny_models
from deltasync.dtypes import BY_NAME
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.computation import Kind
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.reads import FORM
from tests.delta.device_payloads import use_every_kernel
from tests.quant.kernels import FORMS, kernel_of

_TYPES = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}
Calls = dict[str, tuple[str, str, Mapping[str, Any]]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where they run")
@pytest.mark.timeout(600)  # it fills a core
def test_kernels_compile_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run = Calls(), InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Every kernel that is interpreted, once for each way to compile it."""
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        described = {name: _described(given[name]) for name in self.arg_names}
        call = self.fn.__module__, self.fn.__name__, described
        is_of_form = described.get("READ", 0) >= FORM
        told_apart = described["READ"] if is_of_form else _told_apart(self.fn, described)
        calls.setdefault(json.dumps((*call[:2], told_apart)), call)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    own, wire, words = (BY_NAME[name] for name in ("float32", "bfloat16", "int32"))
    formats = frozenset({(wire, wire), (own, wire), (own, own), (words, words)})
    some = frozenset(
        Kind(own, kernel_of(form)) for form in FORMS if form in (BlockFp8(), Fp8(), Int4())
    )
    every = frozenset(Kind(wire, kernel_of(form)) for form in FORMS) | some
    for dims, has_gaps, has_codes, computed in (
        (0, False, False, every),
        (1, False, False, frozenset()),
        (3, True, False, some),
        (3, False, True, frozenset()),
    ):
        sync_tiny_models(
            formats,
            1 << 18,
            torch.device("cpu"),
            computed=computed,
            box_dims=dims,
            has_codes=has_codes,
            has_gaps=has_gaps,
        )
    use_every_kernel()
    program = subprocess.run(
        [sys.executable, "-m", "tests.delta.compiled"],
        input=json.dumps(list(calls.values())),
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert not program.returncode, program.stdout + program.stderr


def _told_apart(kernel: Any, described: Mapping[str, Any]) -> dict[str, Any]:
    """What a kernel is compiled for: numbers that are no constants are not told apart."""
    hints = kernel.__annotations__
    return {
        name: value if "constexpr" in str(hints.get(name, "")) or isinstance(value, str) else ""
        for name, value in described.items()
    }


def _described(value: Any) -> Any:
    """As `compiled` takes it."""
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, TritonType):
        return value.name
    if isinstance(value, InterpretedFunction):
        return f"{value.fn.__module__}:{value.fn.__name__}"
    return value
