"""Trainers of bfloat16 or float32 that serve quantized weights."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from deltasync import SenderOptions
from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from tests.quant.served import assert_holds, cold, engine, served, step, trainer
from tests.worlds.links import fleet

FORMS: list[Form] = [
    BlockFp8(),
    BlockFp8("ue8m0"),
    Fp8("channel"),
    Fp8("tensor"),
    Int8(),
    MxFp8(),
]
WIDE = Fp8("channel"), Fp8("tensor"), Int8()
"""Of which engines may hold scales as float32."""


@pytest.mark.promise(
    "Bits",
    "An engine that serves a quantized form holds what it would load from a checkpoint of the "
    "trainer's weights.",
)
@pytest.mark.timeout(300)  # Triton's interpreter takes long, beside other tests
@pytest.mark.parametrize(
    ("form", "dtype", "kernels", "is_wide"),
    [
        *((form, torch.bfloat16, "torch", False) for form in FORMS),
        *((form, torch.float32, "torch", False) for form in FORMS),
        *((form, torch.bfloat16, "torch", True) for form in WIDE),
        (BlockFp8(), torch.bfloat16, "triton", False),
    ],
    ids=str,
)
def test_an_engine_holds_what_a_cold_load_gives(
    form: Form, dtype: torch.dtype, kernels: Literal["torch", "triton"], is_wide: bool
) -> None:
    """Through steps that change nothing, little and all."""

    def loaded() -> dict[str, Tensor]:
        return {
            name: tensor.float() if is_wide and name.endswith("_scale") else tensor
            for name, tensor in cold(source, form).items()
        }

    source = trainer(0, dtype)
    replica = engine(loaded())
    with fleet(served(source, form), options=SenderOptions(kernels=kernels)) as here:
        here.add(replica)
        here.wait(1)
        for number, share in enumerate([0, 0.01, 1, 0]):
            step(source, share, number)
            stats = here.sender.send_weights(timeout_s=60)
            assert_holds(replica, loaded())
        assert stats.nnz == 0
