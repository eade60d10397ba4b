"""Kernels that quantize and compare find what the reference finds, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync.delta.backend import snapshot_of
from deltasync.delta.batched.backend import BatchedBackend
from deltasync.delta.bits import as_bits, torch_dtype
from deltasync.delta.policy import Policy
from deltasync.delta.shard import whole
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.matrices import Matrix, ServedReader
from deltasync.wire.messages import ParameterSpec

pytestmark = pytest.mark.timeout(120)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MATRICES = {
    "normal": (130, 160),
    "zero": (1, 32),
    "tiny": (128, 128),
    "any bits": (140, 32),
    "huge": (2, 4128),
    "odd": (5, 7),
}


def matrix(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Finite bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
    match kind:
        case "normal" | "odd":
            return normal.bfloat16()
        case "zero":
            return torch.zeros(shape, dtype=torch.bfloat16)
        case "tiny":  # denormal numbers of either sign
            return (bits & ~0x7F80).view(torch.bfloat16)
        case "huge":
            return (normal.sign() * 3.3e38).bfloat16()
    found = bits.view(torch.bfloat16)
    return found.where(found.isfinite(), 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_kernels_compute_the_reference(scale: str, dtype: torch.dtype, device: str) -> None:
    form = BlockFp8(scale)  # type: ignore[arg-type]
    weights = {k: torch.ones(shape, dtype=dtype, device=device) for k, shape in MATRICES.items()}
    backend, readers = snapshot(list(weights.values()), form)
    for seed, dense_above in enumerate((1.0, 0.0)):
        for kind, weight in weights.items():
            weight.copy_(matrix(kind, MATRICES[kind], seed))
        sync(backend, readers, Policy(dense_above=dense_above, chunk_numel=8192))
        for number, reader in enumerate(readers):
            expected = cold(reader, form)
            assert torch.equal(backend.flats[number].line.cpu(), as_bits(expected).view(-1))
        chunks = np.arange(len(backend.ledger.sums))
        assert (backend.measure(chunks) == backend.ledger.sums).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_a_block_that_is_not_finite_has_the_scale_that_torch_gives_it(scale: str) -> None:
    form = BlockFp8(scale)  # type: ignore[arg-type]
    weight = torch.ones(128, 128, dtype=torch.bfloat16)
    backend, readers = snapshot([weight], form)
    for value in (torch.nan, torch.inf, -torch.inf):
        weight[3, 5] = value
        sync(backend, readers, Policy(dense_above=1.0, chunk_numel=8192))
        codes, scales = (
            flat.line.view(torch_dtype(flat.dtype)).float() for flat in backend.flats.values()
        )
        expected = form.quantize(weight, {})
        assert torch.equal(scales.isnan(), expected["weight_scale_inv"].isnan().view(-1))
        assert torch.equal(scales.isinf(), expected["weight_scale_inv"].isinf().view(-1))
        assert torch.equal(codes.isnan(), expected["weight"].float().isnan().view(-1))


def snapshot(weights: list[Tensor], form: BlockFp8) -> tuple[BatchedBackend, list[ServedReader]]:
    matrices = [Matrix(t, form, name=f"{n}.weight") for n, t in enumerate(weights)]
    readers = [ServedReader(one, suffix) for one in matrices for suffix in one.parts]
    specs = [
        ParameterSpec((f"{number}",), reader.shape, reader.dtype)
        for number, reader in enumerate(readers)
    ]
    backend = snapshot_of(whole(specs), readers, chunk_numel=8192, kernels="triton")
    assert isinstance(backend, BatchedBackend)
    return backend, readers


def sync(backend: BatchedBackend, readers: list[ServedReader], policy: Policy) -> None:
    delta = backend.compare(
        readers, policy=policy, bucket_bytes=1 << 16, max_held_bytes=1 << 20, base_version=1
    )
    found = backend._live._found
    assert found is not None
    assert len(found.matrices) == 1  # all but one are quantized as they are compared
    for bucket in delta.buckets():
        bucket.write(torch.empty(bucket.num_bytes, dtype=torch.uint8, device=backend.device))
    delta.decided()


def cold(reader: ServedReader, form: BlockFp8) -> Tensor:
    """By the reference, on the CPU."""
    weight = reader.matrix._reader.flat.tensor.cpu()
    return Matrix(weight, form, name="cold.weight").served(reader.suffix)
