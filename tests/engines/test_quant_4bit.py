"""Forms of 4 bits against the functions that write checkpoints in them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from warnings import catch_warnings

import pytest
import torch
from torch import Tensor

from deltasync.delta.bits import as_bits, torch_dtype
from deltasync.quant.form import Form
from deltasync.quant.int4 import Int4
from deltasync.quant.nvfp4 import CompressedNvfp4
from tests.quant.kinds import peak_of
from tests.quant.matrices import MATRICES, matrix

with catch_warnings(action="ignore"):  # of what torch imports to compile
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _not_compiled() -> None:
    """compressed-tensors compiles a function; its operations are the same without."""
    torch.compiler.set_stance("force_eager")


def extremes(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """bf16 [rows, groups]: what llm-compressor's observer has seen of each group."""
    groups = weight.view(len(weight), -1, group)
    return groups.amin(-1), groups.amax(-1)


def global_scale(weights: list[Tensor]) -> Tensor:
    """The steps of `Observer.get_global_scale` of llm-compressor, for layers that are fused."""
    peak = torch.tensor(0.0)
    for weight in weights:
        peak = torch.max(peak, -weight.amin())
        peak = torch.max(peak, weight.amax())
    found: Tensor = generate_gparam(-peak.reshape(1), peak.reshape(1))
    return found


def compressed(weights: list[Tensor], *, number: int = 0) -> dict[str, Tensor]:
    """What a checkpoint of NVFP4 has of one of several layers that are fused."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert scheme.weights is not None
    total, weight = global_scale(weights), weights[number]
    scale, zero = calculate_qparams(*extremes(weight, 16), scheme.weights, global_scale=total)
    module = {
        "weight": weight,
        "weight_scale": scale.to(weight.dtype),  # the dtype of the module's parameter
        "weight_zero_point": zero,
        "weight_global_scale": total,
    }
    return dict(NVFP4PackedCompressor.compress(module, scheme))


def pack_quantized(weight: Tensor, group: int | None) -> dict[str, Tensor]:
    """What a checkpoint of INT4 has of a layer."""
    strategy = {"group_size": group, "strategy": "group"} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, **strategy)
    scale, zero = calculate_qparams(*extremes(weight, group or weight.shape[1]), args)
    module = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return dict(PackedQuantizationCompressor.compress(module, scheme))


def served(form: Form, weights: list[Tensor], *, number: int = 0) -> dict[str, Tensor]:
    whole = form.whole(peak_of(*weights))
    return {**whole, **form.quantize(weights[number], whole)}


def check(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(as_bits(tensor), as_bits(theirs[name])), name


Producer = Callable[[Tensor], Mapping[str, Tensor]]
PRODUCERS: list[tuple[Form, Producer]] = [
    (CompressedNvfp4(), lambda weight: compressed([weight])),
    *((Int4(group), partial(pack_quantized, group=group)) for group in (32, 128, None)),
]


@pytest.mark.promise(
    "Bits",
    "Codes and scales of 4 bits are those that the producers of checkpoints write.",
)
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize(("form", "produce"), PRODUCERS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_bits_are_those_of_compressed_tensors(
    form: Form, produce: Producer, kind: str, rows: int
) -> None:
    weight = matrix(kind, rows, 256, seed=rows)
    theirs, ours, parts = produce(weight), served(form, [weight]), form.parts((rows, 256))
    check(ours, theirs)
    assert set(parts) == set(theirs)
    for name, part in parts.items():
        assert (part.shape, torch_dtype(part.dtype)) == (theirs[name].shape, theirs[name].dtype)
    if "weight_shape" in theirs:
        assert parts["weight_shape"].elements == tuple(theirs["weight_shape"].tolist())


def test_fused_layers_of_compressed_tensors_share_a_global_scale() -> None:
    for kinds in [("plain", "outliers", "zero"), ("tiny", "plain", "zero"), ("zero", "zero")]:
        weights = [matrix(kind, 8 + n, 64, seed=n) for n, kind in enumerate(kinds)]
        for number in range(len(weights)):
            ours = served(CompressedNvfp4(), weights, number=number)
            check(ours, compressed(weights, number=number))
