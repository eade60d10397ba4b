"""A source and a target as users write them: of public names alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from deltasync import NamedTensor, WeightSource, WeightTarget
from deltasync.delta.bits import Flat, Live
from deltasync.errors import TargetMoved
from deltasync.sync.target.base import match_parameters, refuse_overlap
from deltasync.wire.messages import ParameterSpec
from tests.worlds.links import fleet, until
from tests.worlds.target_contract import TargetContract


class DictSource(WeightSource):
    """Named tensors."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor((name,), tensor) for name, tensor in self._weights.items()]


class DictTarget(WeightTarget):
    """Named tensors."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.finished: list[Collection[int] | None] = []
        self._bound: dict[str, int] = {}

    def parameters(self) -> tuple[ParameterSpec, ...]:
        return tuple(
            ParameterSpec((name,), tuple(tensor.shape), Flat.of(tensor).dtype)
            for name, tensor in self.weights.items()
        )

    def bind(self, layout: Sequence[ParameterSpec]) -> Mapping[int, Live]:
        held = self.parameters()
        numbers = match_parameters(held, layout)
        live = [Flat.of(tensor, name=name) for name, tensor in self.weights.items()]
        refuse_overlap(held, live)
        self._bound = {name: tensor.data_ptr() for name, tensor in self.weights.items()}
        return dict(zip(numbers, live, strict=True))

    def check_unmoved(self) -> None:
        if {name: tensor.data_ptr() for name, tensor in self.weights.items()} != self._bound:
            raise TargetMoved("a tensor was replaced")

    def finish(self, changed: Collection[int] | None = None) -> None:
        self.finished.append(changed)


class TestDictTarget(TargetContract):
    def make_target(self, state: dict[str, Tensor]) -> WeightTarget:
        self.held = {name: tensor.clone() for name, tensor in state.items()}
        return DictTarget(self.held)

    def replace_storage(self, name: str) -> None:
        self.held[name] = self.held[name].clone()


def test_they_sync() -> None:
    trained = {"a": torch.randn(8, 4), "b": torch.randn(3)}
    target = DictTarget({name: torch.zeros_like(t) for name, t in trained.items()})
    with fleet(DictSource(trained)) as here:
        here.join(target)
        assert all(map(torch.equal, trained.values(), target.weights.values()))
        trained["b"] += 1
        here.sender.send_weights(timeout_s=30)
        until(lambda: target.finished[-1] == {1})
        assert all(map(torch.equal, trained.values(), target.weights.values()))
