"""What every form promises: the bits of producers and engines, and nothing more of a change."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from deltasync.delta.bits import as_bits, torch_dtype
from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.matrices import Matrix, ServedReader
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from tests.quant.golden.four_bits import FILE
from tests.quant.kinds import FINITE, KINDS, bits_of, cases, digest, matrix, peak_of
from tests.quant.matrices import MATRICES

EIGHT_BITS: list[Form] = [
    BlockFp8(),
    BlockFp8("ue8m0"),
    BlockFp8("bfloat16"),
    Fp8("channel"),
    Fp8("tensor"),
    Int8(),
    MxFp8(),
]
PRODUCERS: dict[str, Form] = {
    "nvfp4 of compressed-tensors": CompressedNvfp4(),
    "nvfp4 of modelopt": ModelOptNvfp4(),
    "int4, 32": Int4(32),
    "int4, rows": Int4(None),
}
GOLDEN = json.loads((Path(__file__).parent / "golden" / "forms.json").read_text())

every_form = pytest.mark.parametrize(
    "form", [*EIGHT_BITS, *PRODUCERS.values()], ids=lambda form: form.name
)


def quantized(form: Form, weight: Tensor) -> Mapping[str, Tensor]:
    """All parts, at once."""
    whole = form.whole(peak_of(weight))
    parts = {**whole, **form.quantize(weight, whole)}
    found = form.parts((weight.shape[0], weight.shape[1]))
    return {suffix: parts[suffix] for suffix in found if suffix in parts}


@st.composite
def weights(draw: st.DrawFn, form: Form) -> Tensor:
    step = 1 if form in EIGHT_BITS and not isinstance(form, MxFp8) else 32
    rows, count = draw(st.integers(1, 200)), draw(st.integers(1, 200 // step))
    return matrix(draw(st.sampled_from(KINDS)), (rows, count * step), draw(st.integers(0, 2**32)))


@pytest.mark.parametrize("form", EIGHT_BITS, ids=lambda form: form.name)
def test_bits_are_those_of_the_engines(form: Form) -> None:
    for case, weight in cases(KINDS):
        assert digest(weight) == GOLDEN["inputs"][case]
        parts = quantized(form, weight)
        for suffix, expected in GOLDEN["forms"][form.name]["cases"].get(case, {}).items():
            assert digest(parts[suffix]) == expected, (case, suffix)


@pytest.mark.promise(
    "Bits",
    "Codes and scales of 4 bits are those that the producers of checkpoints write.",
)
@pytest.mark.parametrize("form", PRODUCERS)
def test_parts_are_those_that_producers_write(form: str) -> None:
    golden = load_file(FILE)
    for kind in MATRICES:
        weight = golden[f"matrix/{kind}/weight"]
        found = Matrix(weight, PRODUCERS[form], name="layer.weight")
        theirs = {path.rpartition("/")[2] for path in golden if path.startswith(f"{form}/{kind}/")}
        assert theirs == set(found.parts)
        for name, part in found.parts.items():
            expected, served = golden[f"{form}/{kind}/{name}"], found.served(name)
            assert (expected.shape, expected.dtype) == (part.shape, torch_dtype(part.dtype))
            assert (served.shape, served.dtype) == (expected.shape, expected.dtype)
            # Producers have e4m3 NaN of both signs, and forms have one.
            same = bits_of if expected.dtype == torch.float8_e4m3fn else as_bits
            assert torch.equal(same(served), same(expected)), (kind, name)


@every_form
@settings(max_examples=20)
@given(data=st.data())
def test_ranges_and_bands_are_slices_of_the_whole(form: Form, data: st.DataObject) -> None:
    weight = data.draw(weights(form))
    before, whole = weight.clone(), form.whole(peak_of(weight))
    expected = quantized(form, weight)
    step = form.rows * data.draw(st.integers(1, 9))
    bands = [form.quantize(weight[n : n + step], whole) for n in range(0, len(weight), step)]
    served = Matrix(weight, form, name="a.weight")
    for suffix, part in served.parts.items():
        tensor = served.served(suffix)
        assert (tensor.shape, tensor.dtype) == (part.shape, torch_dtype(part.dtype))
        bits = as_bits(tensor.contiguous()).view(-1)
        if suffix in expected:
            assert torch.equal(bits, as_bits(expected[suffix].contiguous()).view(-1)), suffix
        if part.rows is not None:
            joined = torch.cat([as_bits(band[suffix]) for band in bands])
            assert torch.equal(joined.view(-1), bits), suffix
        start = data.draw(st.integers(0, len(bits)))
        stop = data.draw(st.integers(start, len(bits)))
        assert torch.equal(ServedReader(served, suffix).read(start, stop), bits[start:stop]), suffix
    assert torch.equal(as_bits(weight), as_bits(before)), "the trainer's weights were written"


@every_form
def test_what_has_no_form_is_refused_by_name(form: Form) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        weight = matrix("usual", (130, 224), 0)
        weight[129, 3] = value
        with pytest.raises(ConfigError, match=r"layer.3.weight: NaN or infinity"):
            Matrix(weight, form, name="layer.3.weight").check()
    weight[129, 3:] = 0
    Matrix(weight, form, name="layer.3.weight").check()
    zeros = Matrix(torch.zeros(130, 224, dtype=torch.bfloat16), form, name="a.weight")
    if form == ModelOptNvfp4():
        with pytest.raises(ConfigError, match=r"a.weight: a matrix of zeros has no "):
            zeros.check()
        return
    zeros.check()
    if form in EIGHT_BITS:
        assert (zeros.served("weight").float() == 0).all()


def of(rows: int, cols: int, form: Form) -> Matrix:
    return Matrix(torch.ones(rows, cols, dtype=torch.bfloat16), form, name="gate.weight")


UNMATCHED: dict[str, Callable[[], object]] = {
    r"scales of block FP8: 'e8' is not known; choose one of": lambda: BlockFp8("e8"),  # type: ignore[arg-type]
    r"scales of FP8: 'row' is not known": lambda: Fp8("row"),  # type: ignore[arg-type]
    r"groups of 0": lambda: Int4(0),
    r"^gate.weight: MXFP8 of .* is for blocks of 32": lambda: of(4, 100, MxFp8()),
    r"^gate\.weight: NVFP4 of .* blocks": lambda: of(4, 24, CompressedNvfp4()),
    r"^gate\.weight: INT4 of .* blocks": lambda: of(4, 192, Int4(128)),
    r"^gate\.weight: INT4 of .* blocks? ": lambda: of(0, 32, Int4(None)),
}


@pytest.mark.parametrize("says", UNMATCHED)
def test_what_cannot_be_matched_is_refused_by_name(says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        UNMATCHED[says]()


@pytest.mark.gpu
@every_form
def test_bits_on_a_gpu_are_those_on_a_cpu(form: Form) -> None:
    drawn = [weight for _, weight in cases(KINDS if form in EIGHT_BITS else FINITE)]
    for weight in drawn:
        if form == ModelOptNvfp4() and not weight.any():
            continue  # it has no such form: the sign of a NaN is the device's
        there = quantized(form, weight.cuda())
        for suffix, part in quantized(form, weight).items():
            assert torch.equal(as_bits(there[suffix]).cpu(), as_bits(part)), suffix
