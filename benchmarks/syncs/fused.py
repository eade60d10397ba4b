"""A stand-in for an engine's model, where none is installed: fused and stacked as vLLM has it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from benchmarks.syncs.geometry import Geometry

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class Fused(nn.Module):
    """Parameters and the loader of a decoder of the Qwen3 family. It computes nothing.

    Args:
        geometry: Of the whole.
        device: Where the parameters are.
        rank, world: Which part, of an engine that is tensor parallel.
        spreads_experts: Each rank holds some experts whole, and not a part of each.

    Attributes:
        parts: Where each checkpoint tensor is, by name: a view.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        *,
        spreads_experts: bool = False,
    ) -> None:
        super().__init__()
        self._rank, self._world = rank, world
        self._experts = geometry.experts if spreads_experts else 0
        places: dict[str, tuple[str, int, int]] = {}  # parameter, first row, rows
        sizes: dict[str, tuple[int, ...]] = {}
        for name, whole in geometry.shapes().items():
            live, before = self._place(name, sizes)
            dim, start, stop = self.cut(name, whole)
            shape = (*whole[:dim], stop - start, *whole[dim + 1 :])
            rows = shape[0]
            places[name] = (live, before, rows)
            sizes[live] = (before + rows, *shape[1:])
        held: dict[str, Tensor] = {}
        for live, shape in sizes.items():
            held[live] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            self.register_parameter(live.replace(".", "_"), nn.Parameter(held[live], False))
        self.parts = {n: held[live].narrow(0, at, rows) for n, (live, at, rows) in places.items()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy each tensor to where it belongs. Returns the names of those that are held here."""
        loaded = set()
        for name, tensor in weights:
            if self._world > 1:
                dim, start, stop = self.cut(name, tuple(tensor.shape))
                if start == stop:
                    continue
                tensor = tensor.narrow(dim, start, stop - start)
            self.parts[name].copy_(tensor)
            loaded.add(name)
        return loaded

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(dimension, start, stop): what is held here of a checkpoint tensor."""
        if self._experts and (found := _EXPERT.match(name)):
            is_here = int(found[2]) * self._world // self._experts == self._rank
            return 0, 0, shape[0] if is_here else 0
        dim = 1 if re.search(r"(o|down)_proj", name) else 0
        if len(shape) == 1 or name.endswith("mlp.gate.weight"):
            return 0, 0, shape[0]
        step = shape[dim] // self._world
        return dim, self._rank * step, (self._rank + 1) * step

    def _place(self, name: str, sizes: dict[str, tuple[int, ...]]) -> tuple[str, int]:
        """The parameter that a checkpoint tensor is a part of, and how many rows it has so far."""
        live = _EXPERT.sub(lambda m: f"{m[1]}.{'w2' if m[3] == 'down' else 'w13'}", name)
        live = re.sub(r"\b[qkv]_proj", "qkv", live)
        live = re.sub(r"\b(gate|up)_proj", "gate_up", live)
        return live, sizes.get(live, (0,))[0]
