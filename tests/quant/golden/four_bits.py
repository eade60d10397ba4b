"""Write what the producers of 4-bit checkpoints make of some matrices: four_bits.safetensors.

Run `python -m tests.quant.golden.four_bits` where compressed-tensors and nvidia-modelopt are
installed: tests of the forms compare with it where they are not.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.quant.matrices import MATRICES, matrix

FILE = Path(__file__).with_suffix(".safetensors")


def modelopt(weight: Tensor) -> dict[str, Tensor]:
    """What a checkpoint of ModelOpt has of a layer whose weight quantizer is dynamic."""
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    total = NVFP4QTensor.get_weights_scaling_factor_2(weight)
    scale, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, total)
    codes = to_quantized_weight(weight.clone(), scale, "nvfp4", total, 16)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": total}


def main() -> None:
    from tests.engines.quantizers import int4, nvfp4

    torch.compiler.set_stance("force_eager")
    found: dict[str, Tensor] = {}
    for kind in MATRICES:
        weight = matrix(kind, 3, 64, seed=1)
        made = {
            "matrix": {"weight": weight},
            "nvfp4 of compressed-tensors": nvfp4([weight]),
            "nvfp4 of modelopt": modelopt(weight),
            "int4, 32": dict(int4(32)(weight)),
            "int4, rows": dict(int4(None)(weight)),
        }
        for form, parts in made.items():
            found |= {f"{form}/{kind}/{name}": part for name, part in parts.items()}
    producers = {name: version(name) for name in ("compressed-tensors", "nvidia-modelopt", "torch")}
    save_file(found, FILE, metadata=producers)


if __name__ == "__main__":
    main()
