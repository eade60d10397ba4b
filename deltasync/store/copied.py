"""A target for who wants the trainer's weights themselves: a copy of whatever is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltasync.delta.bits import Flat, torch_dtype
from deltasync.sync.target.base import WeightTarget
from deltasync.wire.messages import ParameterSpec


class CopiedTarget(WeightTarget):
    """Holds every parameter that the sender has, in memory of its own.

    It says nothing of what it holds, and takes names, shapes and dtypes as they are sent; so it is
    for an engine of one rank. A parameter that keeps its shape and dtype keeps its memory.

    Args:
        device: Where the copy is kept.

    Attributes:
        tensors: The copy by name, tied ones under each name. Read only; written in each sync.
    """

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.tensors: Mapping[str, Tensor] = {}

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """None: all that the sender has will do."""
        return ()

    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        """Have memory for each parameter. What the layout does not name is let go."""
        known, tensors = self.tensors, dict[str, Tensor]()
        flats: dict[int, Flat] = {}
        for number, spec in enumerate(layout):
            tensor = self._memory(spec, known.get(spec.name))
            tensors.update(dict.fromkeys(spec.names, tensor))
            flats[number] = Flat.of(tensor, name=spec.name)
        self.tensors = tensors
        return flats

    def check_unmoved(self) -> None:
        """The copy stays where it is."""

    def _memory(self, spec: ParameterSpec, held: Tensor | None) -> Tensor:
        dtype = torch_dtype(spec.dtype)
        if held is not None and (tuple(held.shape), held.dtype) == (spec.shape, dtype):
            return held
        return torch.empty(spec.shape, dtype=dtype, device=self._device)
