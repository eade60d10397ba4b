"""Scales that several matrices share, because engines fuse their layers into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from deltasync.quant.form import Form

Fused: TypeAlias = Sequence[tuple[str, ...]]
"""Names of layers beside each other that an engine computes as one."""

FUSED: Fused = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""What vLLM and SGLang fuse. Where a model lacks one of the layers, the others share.

A fused layer has one scale for the whole of it. If its checkpoint has several, both engines compute
with the largest. NVFP4: codes that were made with another scale are then wrong; the experts of
vLLM's fused layers even take the scale of `w1`. Per-tensor FP8: the rounded codes are rounded again
to the largest scale.

Sources: vLLM 0.32, `KNvfp4Static` and `KFp8StaticTensor` in quantization/modelopt.py and
`CompressedTensorsW4A4Fp4`; SGLang 0.5.23, quantization/modelopt_quant.py and
`requantize_with_max_scale` in quantization/utils.py. The groups are those for which llm-compressor
makes one scale, `FUSED_LAYER_NAMES` in observers/helpers.py.
"""


def siblings(name: str, fused: Fused = FUSED) -> tuple[str, ...]:
    """The weights whose layers are fused with that of the weight `name`, with itself."""
    owner, dot, layer = name.removesuffix(".weight").rpartition(".")
    for layers in fused:
        if layer in layers:
            return tuple(f"{owner}{dot}{one}.weight" for one in layers)
    return (name,)


class Shared:
    """What `Form.whole` gives of the matrices that share it, computed once for each version."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._weights: list[Callable[[], Tensor]] = []
        self._parts: Mapping[str, Tensor] | None = None

    def add(self, weight: Callable[[], Tensor]) -> None:
        """Count a matrix in; `weight` returns [rows, cols] bfloat16 of it as it is now."""
        self._weights.append(weight)
        self.changed()

    def changed(self) -> None:
        """Forget what was computed: the trainer has made a step."""
        self._parts = None

    def parts(self) -> Mapping[str, Tensor]:
        """The parts without rows, for every one of the matrices."""
        if self._parts is None:
            self._parts = self._form.whole(weight() for weight in self._weights)
        return self._parts
