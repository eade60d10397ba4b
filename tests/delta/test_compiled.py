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
from deltasync.delta.codecs.base import Needs
from deltasync.delta.kernels import reads
from deltasync.dtypes import BY_NAME
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from tests.delta.device_payloads import use_every_kernel
from tests.delta.device_rows import check
from tests.delta.row_codec_contract import any_pair, row_of
from tests.quant.kernels import FORMS, kernel_of

_TYPES = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}
_ROOT = Path(__file__).parents[2]


pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where they run"),
    pytest.mark.timeout(700),
]

Calls = dict[str, tuple[str, str, Mapping[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every kernel that is interpreted, once for each way to compile it."""
    found: Calls = {}
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        described = {name: _described(given[name]) for name in self.arg_names}
        call = self.fn.__module__, self.fn.__name__, described
        is_of_form = described.get("READ", reads.AS_IS) >= reads.FORM
        told_apart = described["READ"] if is_of_form else _told_apart(self.fn, described)
        found.setdefault(json.dumps((*call[:2], told_apart)), call)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return found


def test_kernels_compile_for_gpus(calls: Calls, tmp_path: Path) -> None:
    own, wire, words = (BY_NAME[name] for name in ("float32", "bfloat16", "int32"))
    formats = frozenset({(wire, wire), (own, wire), (own, own), (words, words)})
    some = frozenset(
        (own, kernel_of(form)) for form in FORMS if form in (BlockFp8(), Fp8(), Int4())
    )
    every = frozenset((wire, kernel_of(form)) for form in FORMS) | some
    for dims, has_gaps, has_codes, quantized in (
        (0, False, False, every),
        (1, False, False, some),
        (3, True, False, some),
        (3, False, True, frozenset()),
    ):
        sync_tiny_models(
            formats,
            1 << 18,
            torch.device("cpu"),
            quantized=quantized,
            box_dims=dims,
            has_codes=has_codes,
            has_gaps=has_gaps,
        )
    for name in ("bfloat16", "float64", "int32", "uint8"):
        new, old = any_pair(BY_NAME[name], 3000, 0.1, 0)
        check([row_of(new, old, BY_NAME[name], Needs.CHANGED)[0]])
    use_every_kernel()
    assert_compiled(calls, tmp_path)


def assert_compiled(calls: Calls, folder: Path) -> None:
    program = subprocess.run(
        [sys.executable, "-m", "tests.delta.compiled"],
        input=json.dumps(list(calls.values())),
        cwd=_ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
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
    return value
