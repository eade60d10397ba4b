"""Forms of 4 bits: what their producers write, and which bytes a change reaches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from deltasync.delta.bits import as_bits, torch_dtype
from deltasync.errors import ConfigError
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.matrices import Matrix, ServedReader
from deltasync.quant.mxfp4 import MxFp4
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from tests.quant.golden.four_bits import FILE
from tests.quant.matrices import MATRICES, matrix

FORMS: dict[str, Form] = {
    "nvfp4 of compressed-tensors": CompressedNvfp4(),
    "nvfp4 of modelopt": ModelOptNvfp4(),
    "mxfp4": MxFp4(),
    "int4, 32": Int4(32),
    "int4, rows": Int4(None),
}
forms = pytest.mark.parametrize("form", [*FORMS.values(), Int4(32, "slime")], ids=lambda f: f.name)
kinds = st.sampled_from(MATRICES)


def served(form: Form, weight: Tensor) -> dict[str, Tensor]:
    whole = form.whole(iter([weight]))
    return {**whole, **form.quantize(weight, whole)}


def with_one_nan(part: Tensor) -> Tensor:
    """Producers have e4m3 NaN of both signs, and forms have one."""
    if part.dtype != torch.float8_e4m3fn:
        return part
    bits = as_bits(part)
    return torch.where(bits & 0x7F == 0x7F, 0x7F, bits).view(part.dtype)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(as_bits(left), as_bits(right))


@pytest.mark.promise(
    "Bits",
    "Codes and scales of 4 bits are those that the producers of checkpoints write.",
)
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("form", FORMS)
def test_parts_are_those_that_producers_write(form: str, kind: str) -> None:
    golden = load_file(FILE)
    weight = golden[f"matrix/{kind}/weight"]
    if form == "mxfp4":
        weight = weight.clamp(-1e38, 1e38)  # beyond, there is no scale
    found = Matrix(weight, FORMS[form], name="layer.weight")
    theirs = {path.rpartition("/")[2] for path in golden if path.startswith(f"{form}/{kind}/")}
    assert theirs == set(found.parts)
    for name, part in found.parts.items():
        expected = with_one_nan(golden[f"{form}/{kind}/{name}"])
        assert (expected.shape, expected.dtype) == (part.shape, torch_dtype(part.dtype))
        assert same(found.served(name), expected), name


@forms
@given(
    kind=kinds,
    rows=st.integers(1, 9),
    cuts=st.sets(st.integers(1, 8), max_size=4),
    seed=st.integers(0, 99),
)
def test_bands_make_up_the_whole(
    form: Form, kind: str, rows: int, cuts: set[int], seed: int
) -> None:
    weight = matrix(kind, rows, 64, seed=seed)
    whole = form.whole(iter([weight]))
    at = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    bands = [form.quantize(weight[start:stop], whole) for start, stop in pairwise(at)]
    for name, part in form.quantize(weight, whole).items():
        assert same(part, torch.cat([band[name] for band in bands])), name


@forms
@given(kind=kinds, rows=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_readers_read_slices(
    form: Form, kind: str, rows: int, seed: int, data: st.DataObject
) -> None:
    found = Matrix(matrix(kind, rows, 64, seed=seed), form, name="layer.weight")
    for name in found.parts:
        reader = ServedReader(found, name)
        start = data.draw(st.integers(0, reader.numel))
        stop = data.draw(st.integers(start, reader.numel))
        whole = as_bits(found.served(name)).view(-1)
        assert torch.equal(reader.read(start, stop), whole[start:stop]), name


@forms
@given(kind=kinds, seed=st.integers(0, 99), row=st.integers(0, 3), col=st.integers(0, 63))
def test_a_change_reaches_its_block_and_what_the_global_scale_moves(
    form: Form, kind: str, seed: int, row: int, col: int
) -> None:
    weight = matrix(kind, 4, 64, seed=seed)
    before = served(form, weight)
    weight[row, col] = weight[row, col] * 1.0078125 + 1e-3
    after = served(form, weight)
    assert list(before) == list(after)
    if any(not same(before[name], after[name]) for name in form.whole(iter([weight]))):
        return  # another global scale: everything may move
    block = 16 if form.shares else 64 if form == Int4(None) else 32
    for name in after:
        if after[name].dim() < 2:
            continue
        each = 64 // after[name].shape[1]  # columns of the matrix that an element stands for
        elsewhere = torch.ones_like(after[name], dtype=torch.bool)
        first = col // block * block // each
        elsewhere[row, first : first + max(1, block // each)] = False
        changed = as_bits(before[name]) != as_bits(after[name])
        assert not (changed & elsewhere).any(), name


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (CompressedNvfp4(), (4, 24)),
        (ModelOptNvfp4(), (4, 8)),
        (MxFp4(), (4, 48)),
        (Int4(128), (4, 192)),
        (Int4(32), (4, 16)),
        (CompressedNvfp4(), (4, 0)),
        (Int4(None), (0, 32)),
    ],
)
def test_shapes_without_whole_blocks_are_refused(form: Form, shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"^gate\.weight: (NVFP4|MXFP4|INT4) of .* blocks? "):
        Matrix(torch.ones(shape, dtype=torch.bfloat16), form, name="gate.weight")


@forms
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(form: Form, value: float) -> None:
    weight = matrix("plain", 4, 64, seed=0)
    weight[2, 40] = value
    with pytest.raises(ConfigError, match=r"^gate\.weight: NaN or infinity"):
        Matrix(weight, form, name="gate.weight").check()


def test_zeros_have_no_scale_of_modelopt() -> None:
    zeros = torch.zeros(4, 64, dtype=torch.bfloat16)
    Matrix(zeros, CompressedNvfp4(), name="gate.weight").check()
    with pytest.raises(ConfigError, match=r"^gate\.weight: a matrix of zeros has no NVFP4"):
        Matrix(zeros, ModelOptNvfp4(), name="gate.weight").check()


@pytest.mark.parametrize("kind", [kind for kind in MATRICES if kind != "huge"])
@pytest.mark.parametrize("group", [32, 128])
def test_int4_of_slime_takes_its_steps(kind: str, group: int) -> None:
    """The steps of its kernel and of what packs, element by element, in numpy's float32."""
    weight = matrix(kind, 3, 256, seed=7).clamp(-(2.0**125), 2.0**125)
    parts = served(Int4(group, "slime"), weight)
    words = parts["weight_packed"].numpy().view(np.uint32)
    for row, values in enumerate(weight.float().numpy()):
        for number in range(256 // group):
            block = values[number * group :][:group]
            scale = max(np.abs(block).max() * np.float32(1 / 7), np.float32(1e-5))
            stored = torch.tensor(scale).bfloat16()
            assert parts["weight_scale"][row, number] == stored
            for column, code in enumerate(np.rint(block / scale), number * group):
                again = torch.tensor(float(code)).bfloat16() * stored / stored
                found = int(words[row, column // 8] >> np.uint32(4 * (column % 8))) & 15
                assert found - 8 == code == again.round()


def test_int4_of_unknown_arithmetic_is_refused() -> None:
    with pytest.raises(ConfigError, match="arithmetic of 'awq' is not known"):
        Int4(32, "awq")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="groups of 0"):
        Int4(0)


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("kind", MATRICES)
def test_gpus_give_what_cpus_give(form: Form, kind: str) -> None:
    if kind == "zero" and isinstance(form, ModelOptNvfp4):
        return  # it has no such form: the sign of a NaN is the device's
    weight = matrix(kind, 7, 256, seed=3)
    here, there = served(form, weight), served(form, weight.cuda())
    for name, part in there.items():
        assert same(part.cpu(), here[name]), name
