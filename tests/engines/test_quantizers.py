"""Forms have the bits of what engines and makers of checkpoints make themselves."""

from __future__ import annotations

import pytest
import torch

from deltasync.quant.nvfp4 import CompressedNvfp4
from tests.engines import quantizers
from tests.engines.quantizers import Quantizer
from tests.quant.kinds import bits_of, peak_of
from tests.quant.matrices import matrix

pytestmark = pytest.mark.timeout(300)

INSTALLED = quantizers.installed()


@pytest.fixture(autouse=True)
def _not_compiled() -> None:
    """compressed-tensors compiles a function; its operations are the same without."""
    torch.compiler.set_stance("force_eager")


@pytest.mark.promise(
    "Bits",
    "Codes and scales of 4 bits are those that the producers of checkpoints write.",
)
@pytest.mark.parametrize("quantizer", INSTALLED, ids=str)
def test_bits_are_those_of_the_engine(quantizer: Quantizer) -> None:
    assert quantizers.all_differing(quantizer) == []


def test_fused_layers_of_compressed_tensors_share_a_global_scale() -> None:
    form, kinds = CompressedNvfp4(), ("plain", "outliers", "zero")
    weights = [matrix(kind, 8 + n, 64, seed=n) for n, kind in enumerate(kinds)]
    whole = form.whole(peak_of(*weights))
    for number, weight in enumerate(weights):
        theirs = quantizers.nvfp4(weights, number=number)
        for suffix, ours in {**whole, **form.quantize(weight, whole)}.items():
            assert torch.equal(bits_of(ours), bits_of(theirs[suffix])), suffix
