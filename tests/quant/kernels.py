"""Forms that kernels compute."""

from __future__ import annotations

from collections.abc import Sequence

from deltasync.quant.block_fp8 import BlockFp8
from deltasync.quant.computation import KernelForm
from deltasync.quant.form import Form
from deltasync.quant.fp8 import Fp8
from deltasync.quant.int4 import Int4
from deltasync.quant.int8 import Int8
from deltasync.quant.mxfp8 import MxFp8
from deltasync.quant.nvfp4 import CompressedNvfp4, ModelOptNvfp4

SQUARES = (130, 160), (1, 32), (2, 4128)
ROWS = (9, 256), (1, 2304), (2, 768)
GROUPS = (9, 128), (17, 256), (1, 4224)
FORMS: dict[Form, Sequence[tuple[int, int]]] = {
    BlockFp8(): SQUARES,
    BlockFp8("ue8m0"): SQUARES,
    Fp8("channel"): ROWS,
    Fp8("tensor"): (*ROWS, (5, 7)),
    Int8(): ROWS,
    Int4(None): ROWS,
    Int4(128): GROUPS,
    Int4(32): GROUPS,
    MxFp8(): GROUPS,
    CompressedNvfp4(): (*GROUPS, (3, 16)),
    ModelOptNvfp4(): (*GROUPS, (3, 16)),
}
"""Shapes of matrices that kernels quantize."""


def kernel_of(form: Form) -> KernelForm:
    """How kernels compute it."""
    assert form.kernel is not None
    return form.kernel
