"""Scales that several matrices share, because engines fuse their layers into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from deltasync.delta.bits import Flat
from deltasync.errors import ConfigError
from deltasync.quant.computation import Total
from deltasync.quant.form import Form
from deltasync.quant.rounding import largest
from deltasync.sync.source.tensors import Maxima, Place

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

    def __init__(self, form: Form, names: tuple[str, ...] = ()) -> None:
        """`names` are those of the matrices that a model may have of them."""
        self._form, self._names = form, names
        self._weights: list[Callable[[], Tensor]] = []
        self._flats: list[Flat] = []
        self._total: Total | None = None
        self._has_parts = self._is_agreed_on = False
        self._agreed: Tensor | None = None
        self._parts: Mapping[str, Tensor] | None = None

    def add(self, weight: Callable[[], Tensor], flat: Flat, *, is_part: bool = False) -> None:
        """Count a matrix in; `weight` returns [rows, cols] bfloat16 of what `flat` has by now."""
        self._weights.append(weight)
        self._flats.append(flat)
        self._total = None
        self._has_parts |= is_part
        self.changed()

    def maxima(self, device: torch.device) -> Maxima:
        """Their largest magnitude, if the form `shares`."""
        crosses = self._has_parts or len(self._weights) < len(self._names)
        return Maxima(
            Place(f"{self._names[0]}/{self._form.name}", 1, 0, 1, crosses),
            device,
            own=self._peak,
            agree=self._agree,
        )

    def _peak(self) -> Tensor:
        """bfloat16[1]."""
        peaks = [largest(weight(), (0, 1)) for weight in self._weights]
        return largest(torch.cat(peaks), (0, 1)).flatten()

    def _agree(self, peak: Tensor) -> None:
        self._agreed, self._parts = peak.clone(), None
        self._is_agreed_on = True

    def changed(self) -> None:
        """Forget what was computed: the trainer has made a step."""
        self._agreed = self._parts = None

    @property
    def total(self) -> Total | None:
        """The same for kernels; None if it takes what other ranks hold."""
        if self._has_parts or self._is_agreed_on:
            return None
        if self._total is None:
            self._total = Total(tuple(self._flats))
        return self._total

    def parts(self) -> Mapping[str, Tensor]:
        """The parts without rows, for every one of the matrices.

        Raises ConfigError if ranks have not agreed on what this takes.
        """
        if self._parts is None and self._form.shares:
            if self._agreed is None and self._has_parts:
                raise ConfigError(f"{self._names[0]}: ranks have not agreed on its maximum")
            peak = self._peak() if self._agreed is None else self._agreed
            self._parts = self._form.whole(peak)
        return self._parts or {}
