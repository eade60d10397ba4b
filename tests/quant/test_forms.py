"""What every form promises: the bits of engines, whatever is read of them, and nothing more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int8 import Int8
from deltasync.quant.matrices import Matrix, ServedReader
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.rounding import power_of_two, power_of_two_above
from tests.quant.kinds import FINITE, KINDS, bits_of, cases, digest, matrix

BLOCKS: dict[Form, tuple[int, int]] = {
    BlockFp8(): (128, 128),
    BlockFp8("ue8m0"): (128, 128),
    BlockFp8("float32", "nemo-rl"): (128, 128),
    BlockFp8("ue8m0", "nemo-rl"): (128, 128),
    BlockFp8(arithmetic="compressed-tensors"): (128, 128),
    Fp8("channel"): (1, 10**6),
    Fp8("tensor"): (10**6, 10**6),
    Fp8("channel", "vllm"): (1, 10**6),
    Fp8("tensor", "vllm"): (10**6, 10**6),
    Int8(): (1, 10**6),
    MxFp8(): (1, 32),
    MxFp8("compressed-tensors"): (1, 32),
}
"""Rows and columns that share a scale."""

GOLDEN = json.loads((Path(__file__).parent / "golden" / "forms.json").read_text())

every_form = pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)


def quantized(form: Form, weight: Tensor) -> Mapping[str, Tensor]:
    """All parts, at once."""
    whole = form.whole(iter([weight]))
    parts = {**whole, **form.quantize(weight, whole)}
    return {suffix: parts[suffix] for suffix in form.parts((weight.shape[0], weight.shape[1]))}


def shapes(form: Form, limit: int = 300) -> st.SearchStrategy[tuple[int, int]]:
    step = 32 if isinstance(form, MxFp8) else 1
    return st.tuples(
        st.integers(1, limit), st.integers(1, limit // step).map(lambda count: count * step)
    )


@every_form
def test_bits_are_those_of_the_engines(form: Form) -> None:
    for case, weight in cases(KINDS):
        assert digest(weight) == GOLDEN["inputs"][case]
        parts = quantized(form, weight)
        for suffix, expected in GOLDEN["forms"][form.name]["cases"].get(case, {}).items():
            assert digest(parts[suffix]) == expected, (case, suffix)


@every_form
def test_parts_are_as_they_were_announced(form: Form) -> None:
    served = Matrix(matrix("usual", (130, 224), 0), form, name="a.weight")
    for suffix, part in served.parts.items():
        tensor = served.served(suffix)
        assert tensor.shape == part.shape
        assert str(tensor.dtype) == f"torch.{part.dtype.name}"


@every_form
@given(data=st.data())
def test_bands_are_slices_of_the_whole(form: Form, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    weight = matrix(kind, data.draw(shapes(form)), data.draw(st.integers(0, 2**32)))
    before, expected = weight.clone(), quantized(form, weight)
    whole = form.whole(iter([weight]))
    step = form.rows * data.draw(st.integers(1, 9))
    starts = range(0, len(weight), step)
    bands = [form.quantize(weight[start : start + step], whole) for start in starts]
    for suffix, part in form.parts((weight.shape[0], weight.shape[1])).items():
        if part.rows is not None:
            joined = torch.cat([as_bits(band[suffix]) for band in bands])
            assert torch.equal(joined, as_bits(expected[suffix])), suffix
    assert torch.equal(as_bits(weight), as_bits(before)), "the trainer's weights were written"


@every_form
@given(data=st.data())
def test_ranges_are_slices_of_the_whole(form: Form, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    weight = matrix(kind, data.draw(shapes(form)), data.draw(st.integers(0, 2**32)))
    served = Matrix(weight, form, name="a.weight")
    for suffix, part in quantized(form, weight).items():
        reader, bits = ServedReader(served, suffix), as_bits(part.contiguous()).view(-1)
        start = data.draw(st.integers(0, len(bits)))
        stop = data.draw(st.integers(start, len(bits)))
        assert torch.equal(reader.read(start, stop), bits[start:stop]), suffix


@every_form
@given(data=st.data())
def test_an_element_changes_its_block_alone(form: Form, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(FINITE))
    weight = matrix(kind, data.draw(shapes(form)), data.draw(st.integers(0, 2**32)))
    rows, cols = weight.shape
    row, col = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    if (
        isinstance(form, BlockFp8)
        and form.arithmetic == "nemo-rl"
        and (row, col) == (rows - 1, cols - 1)
    ):
        return  # it pads other blocks
    changed = weight.clone()
    changed[row, col] = data.draw(st.floats(-500, 500, width=16))
    height, width = BLOCKS[form]
    before, after = quantized(form, weight), quantized(form, changed)
    for suffix, part in before.items():
        differs = (bits_of(part) != bits_of(after[suffix])).nonzero()
        if suffix == "weight":
            assert (differs[:, 0] // height == row // height).all()
            assert (differs[:, 1] // width == col // width).all()
        elif part.dim() == 2:
            assert (differs == torch.tensor([row // height, col // width])).all()


@every_form
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused_by_name(form: Form, value: float) -> None:
    weight = matrix("usual", (130, 224), 0)
    weight[129, 3] = value
    with pytest.raises(ConfigError, match=r"layer.3.weight: NaN or infinity"):
        Matrix(weight, form, name="layer.3.weight").check()
    weight[129, 3:] = 0
    Matrix(weight, form, name="layer.3.weight").check()


def test_codes_per_tensor_are_what_the_kernel_of_vllm_computes() -> None:
    """In numpy: the reciprocal, the product, fmin and fmax, which prefer numbers to NaN."""
    for case, weight in cases(KINDS):
        parts = quantized(Fp8("tensor", "vllm"), weight)
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / parts["weight_scale"].numpy()
            product = weight.float().numpy() * inverse
            clamped = np.fmax(np.float32(-448), np.fmin(product, np.float32(448)))
        expected = torch.from_numpy(clamped).to(torch.float8_e4m3fn)
        assert torch.equal(as_bits(expected), as_bits(parts["weight"])), case


@every_form
def test_a_matrix_of_zeros_stays_so_or_is_refused(form: Form) -> None:
    weight = torch.zeros(130, 224, dtype=torch.bfloat16)
    if form == Fp8("tensor", "vllm"):
        with pytest.raises(ConfigError, match=r"a.weight: a matrix of zeros has no FP8 per tensor"):
            Matrix(weight, form, name="a.weight").check()
    else:
        Matrix(weight, form, name="a.weight").check()
        assert (quantized(form, weight)["weight"].float() == 0).all()


@pytest.mark.parametrize("arithmetic", ["compressed-tensors", "vllm"])
def test_fused_layers_share_the_scale_of_a_tensor(arithmetic: str) -> None:
    form = Fp8("tensor", arithmetic)  # type: ignore[arg-type]
    small, large = matrix("tiny", (3, 5), 0), matrix("usual", (7, 5), 1)
    assert form.shares
    alone, both = (form.whole(iter(some)) for some in ([large], [small, large]))
    assert torch.equal(alone["weight_scale"], both["weight_scale"])


def test_powers_of_two_are_the_least_ones_above() -> None:
    exponents = torch.arange(-148, 128, dtype=torch.float64)
    for factor in (1, 1 + 2**-23, 1.5, 2 - 2**-23):
        values = (2**exponents * factor).float()
        exponent = power_of_two_above(values)
        exact = power_of_two(exponent.clamp(max=254)).double()
        above, fits = exact >= values, exponent <= 254
        assert (above | ~fits).all()
        assert ((exact / 2 < values) | (exponent == 0) | ~fits).all()


def test_what_cannot_be_matched_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'slime': its kernel divides .* choose one of"):
        BlockFp8(arithmetic="slime")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"float32 or ue8m0 scales, not 'e8m0'"):
        BlockFp8("e8m0")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"FP8 per channel .* 'sglang'; choose one of"):
        Fp8("channel", "sglang")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"per channel or per tensor, not per 'row'"):
        Fp8("row")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"MXFP8 .* 'flashinfer'; choose one of"):
        MxFp8("flashinfer")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a.weight: MXFP8 of vllm is for blocks of 32 in a row"):
        Matrix(torch.zeros(4, 100, dtype=torch.bfloat16), MxFp8(), name="a.weight")


def test_a_block_beyond_the_scales_of_compressed_tensors_is_nan() -> None:
    weight = torch.zeros(1, 64, dtype=torch.bfloat16)
    weight[0, 40] = 3.2e38
    parts = quantized(MxFp8("compressed-tensors"), weight)
    assert parts["weight"].float().isnan().tolist() == [[False] * 32 + [True] * 32]
    assert parts["weight_scale"].tolist() == [[0, 255]]


@pytest.mark.gpu
@every_form
def test_bits_on_a_gpu_are_those_on_a_cpu(form: Form) -> None:
    for case, weight in cases(KINDS):
        there = quantized(form, weight.cuda())
        for suffix, part in quantized(form, weight).items():
            assert torch.equal(as_bits(there[suffix]).cpu(), as_bits(part)), (case, suffix)
