"""What Triton's interpreter runs compiles for GPUs: the interpreter finds no errors of types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.language import dtype as TritonType
from triton.runtime.interpreter import InterpretedFunction

from deltasync.delta.batched.warm_up import sync_tiny_models
from deltasync.delta.kernels import reads
from deltasync.dtypes import BY_NAME

_TYPES = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where they run")
@pytest.mark.timeout(400)
def test_kernels_compile_for_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: dict[str, tuple[str, str, Mapping[str, Any]]] = {}
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        described = {name: _described(given[name]) for name in self.arg_names}
        for arguments in _on_gpus(described):
            call = self.fn.__module__, self.fn.__name__, arguments
            calls[json.dumps(call)] = call
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    own, wire = BY_NAME["float32"], BY_NAME["bfloat16"]
    formats = frozenset({(wire, wire), (own, wire), (own, own)})
    quantized = frozenset((dtype, is_ue8m0) for dtype in (own, wire) for is_ue8m0 in (False, True))
    for dims, has_gaps in ((0, False), (1, False), (3, True)):
        sync_tiny_models(
            formats,
            1 << 18,
            torch.device("cpu"),
            quantized=quantized,
            box_dims=dims,
            has_gaps=has_gaps,
        )
    program = subprocess.run(
        [sys.executable, "-m", "tests.delta.compiled"],
        input=json.dumps(list(calls.values())),
        cwd=_ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert not program.returncode, program.stdout + program.stderr


def _described(value: Any) -> Any:
    """As `compiled` takes it."""
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, TritonType):
        return value.name
    return value


def _on_gpus(arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A call, and the same where the GPU converts by itself."""
    yield arguments
    if "NATIVE" in arguments:
        yield {**arguments, "NATIVE": True}
    if arguments.get("READ", reads.AS_IS) >= reads.BLOCK_FP8:
        yield {**arguments, "READ": arguments["READ"] | reads.NATIVE}
