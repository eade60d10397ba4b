"""Models of many modules with a weight each, as mixtures of experts have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deltasync.engines.routed import RoutedTarget
from deltasync.engines.routes.recorder import CheckpointTensor


class Layer(nn.Module):
    """One weight, and a buffer that no checkpoint has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def layers(count: int, seed: int) -> nn.Sequential:
    return nn.Sequential(*(Layer(seed + number) for number in range(count)))


def routed(model: nn.Sequential) -> RoutedTarget:
    def load(weights: Any) -> None:
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)

    names = [f"{number}.weight" for number in range(len(model))]
    checkpoint = [CheckpointTensor(name, (4, 3), torch.bfloat16) for name in names]
    return RoutedTarget(model, checkpoint, load=load)
