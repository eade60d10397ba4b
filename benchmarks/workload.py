"""The models and the changes that every case uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a run measures.

    Attributes:
        hidden, layers: Size of the decoder, about (32 + 34 * layers) * (hidden / 2048)^2 Mi.
        densities: Shares of changed elements.
        crossover: Densities among which dense chunks begin to pay.
        rounds: Times that each case and its baseline take turns.
        commits: (hidden, layers) of the models that `commit` is measured on.
        num_small: Parameters of the model of many small ones.
        memory: Densities at which memory is measured.
        bucket_bytes: Payload size where memory is measured, well below the model's.
        files: (hidden, layers) of checkpoints; 1 GiB in full.
        file_densities: What differs between two of them.
        num_engines: Behind one sender, against one engine.
    """

    hidden: int
    layers: int
    densities: tuple[float, ...]
    crossover: tuple[float, ...]
    rounds: int
    commits: tuple[tuple[int, int], ...]
    num_small: int
    memory: tuple[float, ...]
    bucket_bytes: int
    files: tuple[int, int]
    file_densities: tuple[float, ...]
    num_engines: int


SCALES = {
    "full": Scale(
        hidden=2048,
        layers=1,
        densities=(0.0001, 0.001, 0.003, 0.01, 0.05, 0.2, 0.5, 1.0),
        crossover=(0.1, 0.15, 0.2, 0.3),
        rounds=7,
        commits=((1024, 1), (2048, 1), (2048, 7)),
        num_small=20_000,
        memory=(0.003, 0.01, 0.2, 1.0),
        bucket_bytes=8 << 20,
        files=(2048, 15),
        file_densities=(0.001, 0.01),
        num_engines=16,
    ),
    "quick": Scale(
        hidden=512,
        layers=1,
        densities=(0.0001, 0.003, 0.01, 0.2, 1.0),
        crossover=(0.15,),
        rounds=5,
        commits=((512, 1), (1024, 1)),
        num_small=20_000,
        memory=(0.003, 0.01, 0.2, 1.0),
        bucket_bytes=1 << 20,
        files=(1024, 6),
        file_densities=(0.001, 0.01),
        num_engines=4,
    ),
    "tiny": Scale(
        hidden=64,
        layers=1,
        densities=(0.01, 1.0),
        crossover=(0.15,),
        rounds=2,
        commits=((64, 1),),
        num_small=50,
        memory=(0.01,),
        bucket_bytes=1 << 16,
        files=(64, 1),
        file_densities=(0.01,),
        num_engines=3,
    ),
}


def decoder(hidden: int, layers: int) -> nn.Module:
    """bf16 parameters with the shapes of a small decoder: always the same bits."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (4 * hidden, hidden)}
    for layer in range(layers):
        shapes |= {
            f"layers_{layer}_norm": (hidden,),
            f"layers_{layer}_q": (hidden, hidden),
            f"layers_{layer}_k": (hidden // 4, hidden),
            f"layers_{layer}_v": (hidden // 4, hidden),
            f"layers_{layer}_o": (hidden, hidden),
            f"layers_{layer}_gate": (2 * hidden, hidden),
            f"layers_{layer}_up": (2 * hidden, hidden),
            f"layers_{layer}_down": (hidden, 2 * hidden),
        }
    return _module(shapes | {"norm": (hidden,), "head": (4 * hidden, hidden)})


def many_small(count: int) -> nn.Module:
    """`count` bf16 parameters of 64 elements each."""
    return _module({f"p{number}": (64,) for number in range(count)})


def bits_of(module: nn.Module) -> list[Tensor]:
    """int16[numel] views of the parameters."""
    return [p.detach().view(torch.int16).view(-1) for p in module.parameters()]


def copy_of(module: nn.Module) -> list[Tensor]:
    """The parameters as they are now, in memory of their own."""
    return [p.detach().clone() for p in module.parameters()]


def num_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Flip:
    """A change of about `density` of a module's elements by one unit in the last place.

    Applied twice it undoes itself, so that every sync of a benchmark has the same work.

    Attributes:
        parameters: What it changes.
        positions: int64[n] flat positions in each parameter, increasing.
    """

    def __init__(self, module: nn.Module, density: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [p.detach() for p in module.parameters()]
        self._bits = bits_of(module)
        self.positions = [_chosen(len(bits), density, generator) for bits in self._bits]

    @property
    def count(self) -> int:
        return sum(map(len, self.positions))

    def apply(self) -> None:
        for bits, positions in zip(self._bits, self.positions, strict=True):
            bits.scatter_(0, positions, bits.index_select(0, positions) ^ 1)


def _chosen(numel: int, density: float, generator: torch.Generator) -> Tensor:
    if density >= 1:
        return torch.arange(numel)
    return (torch.rand(numel, generator=generator) < density).nonzero().squeeze(1)


def _module(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    for name, shape in shapes.items():
        values = torch.empty(shape, dtype=torch.bfloat16)
        values.normal_(0, 0.02, generator=generator)
        module.register_parameter(name, nn.Parameter(values))
    return module
