"""Small engines that repack and compute what they load, and cannot load a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from deltasync.delta.bits import as_bits
from deltasync.engines.proof.learnt import learn_routes
from deltasync.engines.proof.recomputed import Learnt
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import DeltaSyncError
from tests.engines.checkpoints import Weights as Source
from tests.engines.repacked import tiles_of_marlin
from tests.worlds.links import Fleet
from tests.worlds.toy_engines import (
    Layer,
    Layered,
    State,
    Weights,
    check_state,
    fails,
    fixed,
    is_as,
    joined,
    of,
    proof_of,
    recovers,
    specs,
    state_of,
)

FP8 = torch.float8_e4m3fn
Step = Callable[[Any], None]


def learnt_of(
    engine: nn.Module, weights: Weights, beside: dict[str, Tensor] | None = None
) -> Learnt:
    return learn_routes(proof_of(engine), specs(weights), beside)


def verified(
    engine: nn.Module, weights: Weights, kind: type[RoutedTarget] = RoutedTarget
) -> RoutedTarget:
    """A target to which routes were learnt; the engine was started on these weights."""
    target = kind(engine, specs(weights), learnt=learnt_of(engine, weights))
    target.verify_routes(weights.items(), lambda: proof_of(engine))
    return target


def check_is(engine: nn.Module, weights: Weights, before: State) -> None:
    """It holds what a fresh engine holds, where it was."""
    assert isinstance(engine, Layered)
    check_state(engine, state_of(type(engine).started(weights)), before)


class Matrix(Layer):
    """Two fused quantized matrices, and the scales of their blocks of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = fixed(torch.empty(16, 8, dtype=FP8))
        self.scale = fixed(torch.empty(4, 2))

    def load(self, name: str, tensor: Tensor) -> None:
        part, which = name.split(".")
        self.get_parameter(which).data.chunk(2)[int(part)].copy_(tensor)

    def work(self) -> None:
        """Tiles the weight, and pads and transposes the scales: not twice."""
        assert self.weight.shape == (16, 8)
        bits = as_bits(self.weight.data)
        tiled = bits.view(2, 8, 2, 4).permute(2, 0, 3, 1).contiguous()
        self.weight = fixed(tiled.view(torch.int32))
        wide = torch.zeros(8, 2)
        wide[:4] = self.scale.data
        self.scale = fixed(wide.t().contiguous().t())


class Kernel:
    """Holds what it computes with outside of parameters."""

    def __init__(self, limit: Tensor) -> None:
        self.limit = limit


class Fused(Matrix):
    """With a scale for each matrix besides, and a scale of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.inputs = fixed(torch.empty(2)), fixed(torch.empty(2))

    def work(self) -> None:
        super().work()
        self.whole = fixed(1 / self.whole.data.max())
        self.inverse = fixed(self.inputs.data.max())
        self.inputs = fixed(1 / self.inverse.data)
        self.alpha = fixed(self.whole.data * self.inputs.data)
        self.kernel = Kernel(self.alpha.data * 448)


class Fp4(Matrix):
    """Codes of 4 bits change places; their scales become half precision without a sign.

    The scales of vLLM's marlin_utils_fp4.py: times a power of two that all of them can bear, which
    the scale of the whole is divided by.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = fixed(torch.empty(128, 48, dtype=torch.uint8))
        self.scale = fixed(torch.empty(128, 6, dtype=FP8))
        self.whole = fixed(torch.empty(2))

    def work(self) -> None:
        self.weight = fixed(tiles_of_marlin(self.weight.data.view(torch.int32)))
        wide = self.scale.data.t().contiguous().to(torch.bfloat16)
        half = wide.to(torch.half).view(-1, 4)[:, [0, 2, 1, 3]].view(6, -1)
        factor = (448 / half.float().max()).log2().floor().exp2().clamp(min=1)
        half = (half.float() * factor).to(torch.half) * 2**7
        half[half < 2] = 0
        self.scale = fixed((half.view(torch.int16) << 1).view(FP8)[:, 1::2].contiguous())
        self.whole = fixed(1 / self.whole.data.max() * 2.0**119 / factor)


ROWS, COLS, GROUP = 64, 96, 32  # of each of two fused matrices of 4-bit codes


class Int4(Matrix):
    """Two fused matrices of 4-bit codes, as compressed-tensors packs them."""

    shapes_as = torch.int64

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight_packed = fixed(torch.empty(2 * ROWS, COLS // 8, dtype=torch.int32))
        self.weight_scale = fixed(torch.empty(2 * ROWS, COLS // GROUP, dtype=torch.bfloat16))
        self.weight_shape = fixed(torch.empty(2, dtype=self.shapes_as))

    def load(self, name: str, tensor: Tensor) -> None:
        if name.endswith("weight_shape"):  # that of the last part stays
            self.weight_shape.data.copy_(tensor)
        else:
            super().load(name, tensor)

    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        return tiles_of_marlin(words)

    def work(self) -> None:
        self.weight_packed = fixed(self.repacked(self.weight_packed.data))
        self.weight_scale.data = self.weight_scale.data.t().contiguous()


class Padded(Int4):
    """Marlin's order of a matrix with more inputs and outputs, which are zeros."""

    shapes_as = torch.bfloat16  # as vLLM's mixtures have it

    @staticmethod
    def repacked(words: Tensor) -> Tensor:
        return tiles_of_marlin(pad(words, (0, 4, 0, 64)))


Draw = Callable[[torch.Generator], Tensor]


def drawn(seed: int, parts: Mapping[str, Draw]) -> dict[str, Tensor]:
    """A checkpoint with these tensors for both parts of each layer."""
    generator = torch.Generator().manual_seed(seed)
    found = {"norm": torch.randn(8, generator=generator).bfloat16()}
    for layer in range(3):
        for part in range(2):
            for name, draw in parts.items():
                found[f"layers.{layer}.{part}.{name}"] = draw(generator)
    return found


def random_bytes(rows: int, columns: int) -> Draw:
    return lambda g: torch.randint(0, 256, (rows, columns), generator=g, dtype=torch.uint8)


MATRIX: dict[str, Draw] = {
    "weight": lambda g: random_bytes(8, 8)(g).view(FP8),
    "scale": lambda g: torch.rand(2, 2, generator=g),
}
FUSED: dict[str, Draw] = MATRIX | {
    name: lambda g: torch.randn(1, generator=g).exp() for name in ("whole", "inputs")
}
FP4: dict[str, Draw] = {
    "weight": random_bytes(64, 48),
    "scale": lambda g: (torch.rand(64, 6, generator=g) * 2 ** (g.initial_seed() % 7)).to(FP8),
    "whole": lambda g: torch.rand(1, generator=g),
}
INT4: dict[str, Draw] = {
    "weight_packed": lambda g: random_bytes(ROWS, COLS // 2)(g).view(torch.int32),
    "weight_scale": lambda g: torch.rand(ROWS, COLS // GROUP, generator=g).bfloat16(),
}


def codes(seed: int) -> dict[str, Tensor]:
    """A checkpoint of an `Int4`, with the shapes of its parts, which never change."""
    return drawn(seed, INT4) | {
        f"layers.{layer}.{part}.weight_shape": torch.tensor([ROWS + part, COLS])
        for layer in range(3)
        for part in range(2)
    }


matrices, scaled, in_fp4 = (partial(drawn, parts=parts) for parts in (MATRIX, FUSED, FP4))


class More(Matrix):
    """A matrix with more parameters, and work of its own.

    Attributes:
        likes: Of what shapes and dtypes they are, by name.
        step: The work.
    """

    likes: ClassVar[Weights] = {}
    step: ClassVar[Step]

    def __init__(self) -> None:
        super().__init__()
        for name, like in self.likes.items():
            setattr(self, name, fixed(torch.empty_like(like)))

    def load(self, name: str, tensor: Tensor) -> None:
        which = name.split(".")[1]
        if which in self.likes and which != "weight":
            self.get_parameter(which).data.copy_(tensor)
        else:
            super().load(name, tensor)

    def work(self) -> None:
        type(self).step(self)


def having(step: Step, **likes: Tensor) -> type[Layered]:
    return of(type("Made", (More,), {"likes": likes, "step": staticmethod(step)}))


def filled(weights: Weights, name: str, value: float) -> dict[str, Tensor]:
    """Those of this name, with one value."""
    return {n: torch.full_like(t, value) for n, t in weights.items() if n.endswith(name)}


def reordered(value: float) -> dict[str, Tensor]:
    """Scales first, so that their numbers are the smallest, and all of one value."""
    weights = matrices(0)
    ahead = sorted(weights, key=lambda name: not name.endswith("scale"))
    return {n: weights[n] for n in ahead} | filled(weights, "scale", value)


def turned(matrix: Any) -> None:
    matrix.weight = fixed(matrix.weight.data.t().contiguous())


def clamped(matrix: Any) -> None:
    """Where they are."""
    turned(matrix)
    matrix.scale.data.clamp_(min=0.5)


def beyond(matrix: Any) -> None:
    """Keeps something that differs for large scales alone."""
    turned(matrix)
    matrix.limit = fixed(matrix.scale.data.max().clamp(min=1000.0))


def copied(weights: Weights) -> Source:
    return Source({name: tensor.clone() for name, tensor in weights.items()})


class Following:
    """An engine that was started on a trainer's weights, and has joined."""

    def __init__(self, here: Fleet, engine: Any, first: dict[str, Tensor]) -> None:
        self.here, self.engine, self.source = here, engine, here.source
        self.serving, self.now = here.serving["engine/0"], first
        self.before = state_of(engine)

    def follows(self, changes: Weights) -> None:
        self.now = self.now | dict(changes)
        self.source.take(self.now)
        recovers(self.here)
        check_is(self.engine, self.now, self.before)

    def fails(self, changes: Weights, said: str = ".") -> DeltaSyncError:
        """The engine stays as it was, and the receiver can go on."""
        before = state_of(self.engine)
        self.source.take(self.now | dict(changes))
        error = fails(self.here, said)
        assert not self.serving.receiver.is_dirty
        assert is_as(self.engine, before)
        return error


@contextmanager
def followed(engine: Layered, first: dict[str, Tensor]) -> Iterator[Following]:
    with joined(copied(first), verified(engine, first)) as here:
        assert here.first.full_synced == 0
        yield Following(here, engine, first)
