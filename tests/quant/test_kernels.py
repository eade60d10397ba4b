"""Kernels that quantize and compare find what the reference finds, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch

from deltasync.delta.bits import as_bits
from deltasync.delta.choice import snapshot_of
from deltasync.delta.device import DeviceSnapshot
from deltasync.delta.shard import whole
from deltasync.quant.batched import can_compute
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.matrices import Matrix, ServedReader
from deltasync.quant.nvfp4 import CompressedNvfp4
from deltasync.quant.sharing import Shared
from deltasync.wire.messages import ParameterSpec
from tests.quant.kernels import FORMS
from tests.quant.kinds import KINDS, every_maximum, matrix

pytestmark = [
    # The interpreter computes with numpy.
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


@pytest.mark.promise(
    "Bits",
    "Kernels quantize to the bits of the reference, whatever the weights are. (CPU, GPU)",
)
@pytest.mark.parametrize("device", DEVICES)
@every_form
def test_kernels_compute_the_reference(form: Form, device: str) -> None:
    shapes = list(islice(cycle(FORMS[form]), 5))
    weights = [
        torch.ones(shape, dtype=(torch.bfloat16, torch.float32)[number % 2], device=device)
        for number, shape in enumerate(shapes)
    ]
    backend, readers = snapshot([Matrix(one, form, name="a.weight") for one in weights])
    for seed in range(2):
        for number, weight in enumerate(weights):
            kind = KINDS[(number + 5 * seed) % len(KINDS)]
            weight.copy_(matrix(kind, shapes[number], 100 * seed + number))
        compare(backend, readers)
        agrees(backend, readers)


@pytest.mark.promise(
    "Bits",
    "Kernels quantize to the bits of the reference, whatever the weights are. (CPU, GPU)",
)
@pytest.mark.gpu
@every_form
def test_kernels_find_the_scale_of_every_maximum(form: Form) -> None:
    maxima = every_maximum().cuda()
    weight = maxima.new_zeros(len(maxima), 256)
    weight[:, :32] = maxima
    held = torch.zeros_like(weight)
    backend, readers = snapshot([Matrix(held, form, name="a.weight")])
    held.copy_(weight)
    compare(backend, readers)
    agrees(backend, readers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [one for one in FORMS if one.shares], ids=lambda form: form.name)
def test_kernels_know_the_largest_of_matrices_that_share_a_scale(form: Form, device: str) -> None:
    weights = [torch.ones(5, 1024, dtype=torch.bfloat16, device=device) for _ in range(4)]
    pair, other = Shared(form), Shared(form)
    matrices = [
        Matrix(one, form, name="a.weight", shared=other if number == 3 else pair)
        for number, one in enumerate(weights)
    ]
    weights[0][3, 5], weights[3][0, 0] = 17, -1000
    backend, readers = snapshot(matrices)
    for largest in (-30, 2):  # none of these is left of a time before
        weights[2][4, 1023] = largest
        weights[0][3, 5] = weights[0][3, 5] / 2
        for one in matrices:
            one.changed()
        compare(backend, readers)
        for line, reader in zip(lines_of(backend), readers, strict=True):
            expected = as_bits(reader.matrix.served(reader.suffix)).view(-1)
            assert torch.equal(line, expected), reader.suffix


@pytest.mark.parametrize(
    "form", [BlockFp8(), Fp8("tensor"), Int4(32), CompressedNvfp4()], ids=lambda form: form.name
)
def test_what_kernels_see_but_a_part_of_is_computed_all_the_same(form: Form) -> None:
    """Of a matrix that they cannot reach, and of one of which another rank sends the codes.

    The one beside them is not disturbed.
    """
    storage = torch.ones(2, 6, 256, dtype=torch.bfloat16)
    shape = FORMS[form][-1] if form.shares else FORMS[form][1]
    weights = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(2)]
    weights.append(storage[1, :, ::2])
    matrices = [Matrix(one, form, name="a.weight") for one in weights]
    backend, readers = snapshot(matrices, codes_elsewhere=matrices[1])
    for one, changed in zip(weights, matrices, strict=True):
        one.copy_(matrix("usual", (one.shape[0], one.shape[1]), 3))
        changed.changed()
    compare(backend, readers)
    agrees(backend, readers)


def test_kernels_leave_blocks_of_too_long_rows_to_torch() -> None:
    weight = torch.ones(128, 128, dtype=torch.bfloat16)
    found = Matrix(weight, BlockFp8(), name="a.weight").computation("weight")
    assert found is not None
    for shape, fits in (
        ((128, (1 << 24) - 32), True),
        ((128, 1 << 24), False),
        (((1 << 31) - 1, 32), True),
        ((1 << 31, 32), False),
    ):
        assert can_compute(replace(found, shape=shape), weight.device) == fits, shape


def snapshot(
    matrices: list[Matrix], *, codes_elsewhere: Matrix | None = None
) -> tuple[DeviceSnapshot, list[ServedReader]]:
    """Of all parts, or all but the first one of one of the matrices."""
    readers = [ServedReader(one, suffix) for one in matrices for suffix in one.parts]
    if codes_elsewhere is not None:
        readers.remove(ServedReader(codes_elsewhere, next(iter(codes_elsewhere.parts))))
    specs = [
        ParameterSpec((f"{number}",), reader.shape, reader.dtype)
        for number, reader in enumerate(readers)
    ]
    found = snapshot_of(whole(specs), readers, kernels="triton")
    assert isinstance(found, DeviceSnapshot)
    return found, readers


def compare(snapshot: DeviceSnapshot, readers: list[ServedReader]) -> None:
    """Bring the snapshot up to date."""
    delta = snapshot.compare(readers, bucket_bytes=1 << 16, max_held_bytes=1 << 20, base_version=1)
    source = snapshot._source
    assert source is not None
    assert source.masks is not None
    for bucket in delta.buckets():
        payload = torch.empty(bucket.sizes.num_bytes, dtype=torch.uint8, device=snapshot.device)
        bucket.pack(payload, lambda: None)
    delta.decided()


def lines_of(snapshot: DeviceSnapshot) -> list[torch.Tensor]:
    """What the snapshot has, in the order of the readers."""
    return [snapshot.lines[place] for place in np.argsort(snapshot.space.order)]


def agrees(snapshot: DeviceSnapshot, readers: list[ServedReader]) -> None:
    """The snapshot has what the reference computes on the CPU."""
    for line, reader in zip(lines_of(snapshot), readers, strict=True):
        weight = reader.matrix._reader.flat.tensor.cpu()
        expected = Matrix(weight, reader.matrix.form, name="a.weight").served(reader.suffix)
        expected_bits = as_bits(expected).view(-1)
        assert torch.equal(line.cpu(), expected_bits), (reader.suffix, reader.shape)
