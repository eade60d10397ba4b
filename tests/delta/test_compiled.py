"""What Triton's interpreter runs compiles for GPUs: the interpreter finds no errors of types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.language import dtype as TritonType
from triton.runtime.interpreter import InterpretedFunction

from deltasync.delta.bits import Flat, Live, torch_dtype
from deltasync.delta.choice import snapshot_of
from deltasync.delta.device import DeviceSnapshot
from deltasync.delta.live import tiles_of
from deltasync.delta.readers import Reader, WireReader
from deltasync.delta.region import Region
from deltasync.delta.shard import Share
from deltasync.delta.staging import LiveWeights
from deltasync.delta.tiles import Space
from deltasync.dtypes import BY_NAME
from deltasync.engines.routes.codes import Codes
from deltasync.engines.routes.route import Piece
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.matrices import Matrix, ServedReader
from deltasync.quant.reads import FORM, codes_of
from deltasync.wire.messages import ParameterSpec
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


def served(form: Form, dtype: torch.dtype) -> ServedReader:
    """Reads 64 codes: those of a matrix of two rows."""
    kernel = kernel_of(form)
    weight = torch.ones(2, 32 * codes_of(kernel.number), dtype=dtype)
    return ServedReader(Matrix(weight, form, name="w.weight"), kernel.codes)


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
    own, wire, words, byte = (BY_NAME[name] for name in ("float32", "bfloat16", "int32", "uint8"))
    formats = [(wire, wire), (own, wire), (own, own), (words, words), (byte, byte)]
    readers: list[Reader] = [
        WireReader.of(torch.ones(64, dtype=torch_dtype(kept)), sent, name="w")
        for kept, sent in formats
    ]
    wide = [form for form in FORMS if form in (BlockFp8(), Fp8(), Int4())]
    codes = [served(form, torch.bfloat16) for form in FORMS]
    codes += [served(form, torch.float32) for form in wide]
    rows = Region(0, ((4, 32), (16, 1)))
    use_every_kernel([*readers, *codes], Region.run(0, 64))
    use_every_kernel(readers, rows)
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


def use_every_kernel(readers: Sequence[Reader], region: Region) -> None:
    """Launch what both ends compile for a region of such tensors.

    The receiver has each in one run, in a box, and as codes of 4 bits, if it can.
    """
    specs = [ParameterSpec((f"{n}",), (128,), one.dtype) for n, one in enumerate(readers)]
    shares = [Share(number, spec, region) for number, spec in enumerate(specs)]
    snapshot = snapshot_of(shares, readers, kernels="triton")
    assert isinstance(snapshot, DeviceSnapshot)
    snapshot.warm_up()
    every = [Share(number, spec, Region.run(0, 128)) for number, spec in enumerate(specs)]
    for make in (_run, _box, _codes):
        flats = {number: make(spec) for number, spec in enumerate(specs)}
        live = LiveWeights(flats, Space(every), kernels="triton")
        live.measure(np.arange(live.space.num_chunks))
        tiles_of(live, Space(shares), torch.device("cpu")).warm_up(is_live=True)


def _run(spec: ParameterSpec) -> Live:
    return Flat.of(torch.zeros(128, dtype=torch_dtype(spec.dtype)))


def _box(spec: ParameterSpec) -> Live:
    storage = torch.zeros(512, dtype=torch_dtype(spec.dtype))
    return Flat.of(storage.as_strided((8, 4, 4), (2, 100, 25)))


def _codes(spec: ParameterSpec) -> Live:
    if spec.dtype.is_floating:
        return _box(spec)
    count, storage = 2 * spec.dtype.item_size, torch.zeros(128, dtype=torch_dtype(spec.dtype))
    source = Region.run(0, 128)
    pieces = [Piece("", source, Region(128 * nth, ((128, 1),)), nth) for nth in range(count)]
    return Codes(pieces, {"": storage}, spec.dtype, 128)


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
