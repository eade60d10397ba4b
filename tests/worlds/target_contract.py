"""The contract that every weight target keeps, as tests: subclass `TargetContract`.

class TestMine(TargetContract):
    def make_target(self, state):
        self.engine = MyEngine(state)
        return MyTarget(self.engine)

    def replace_storage(self, name):
        self.engine.weights[name] = self.engine.weights[name].clone()
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deltasync import dtypes
from deltasync.delta.bits import Flat, Live, torch_dtype
from deltasync.errors import LayoutMismatch, TargetMoved
from deltasync.sync.target.base import WeightTarget
from deltasync.wire.messages import ParameterSpec
from tests.worlds.bits import flipped, random_bits, specs_of
from tests.worlds.payloads import measured, stage_tiles, tiles_between

STRANGER = ParameterSpec(("stranger.weight",), (3,), dtypes.BY_NAME["float32"])


class TargetContract(ABC):
    """What a receiver relies on. One engine rank that holds every parameter, each once."""

    names: tuple[str, ...] = (
        "embed.weight",
        "layers.0.norm.weight",
        "layers.0.proj.weight",
        "scale",
    )
    """Checkpoint names of a model that the target can hold. Override for a model of its own."""

    shapes: tuple[tuple[int, ...], ...] = ((11, 4), (4,), (4, 8), ())
    wire_dtypes: tuple[str, ...] = ("bfloat16", "float32", "bfloat16", "float32")

    @abstractmethod
    def make_target(self, state: dict[str, Tensor]) -> WeightTarget:
        """A target over a new engine whose weights are copies of `state`."""

    def replace_storage(self, name: str) -> None:
        """Give the parameter of the last target made other storage, with the same bits.

        Override it if anybody but the target can do that.
        """
        pytest.skip("nobody else reaches the target's storage")

    @pytest.fixture
    def state(self) -> dict[str, Tensor]:
        """The weights to begin with, by checkpoint name."""
        rng = np.random.default_rng(0)
        state = {}
        for name, shape, wire in zip(self.names, self.shapes, self.wire_dtypes, strict=True):
            dtype = dtypes.BY_NAME[wire]
            bits = random_bits(dtype, math.prod(shape), rng)
            state[name] = bits.view(torch_dtype(dtype)).view(shape)
        return state

    @pytest.fixture
    def layout(self, state: dict[str, Tensor]) -> tuple[ParameterSpec, ...]:
        """The sender's: in an order of its own."""
        return tuple(reversed(specs_of(state)))

    def test_parameters_are_those_of_the_checkpoint(self, state: dict[str, Tensor]) -> None:
        held = {spec.name: spec for spec in self.make_target(state).parameters()}
        assert held == {spec.name: spec for spec in specs_of(state)}

    def test_binding_again_follows_the_layout(
        self, state: dict[str, Tensor], layout: tuple[ParameterSpec, ...]
    ) -> None:
        target = self.make_target(state)
        flats = target.bind(layout)
        assert set(flats) == set(range(len(layout)))
        assert_holds(flats, layout, state)
        assert_holds(target.bind(layout[::-1]), layout[::-1], state)

    @pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
    def test_staged_commit_and_undo_are_exact(
        self, state: dict[str, Tensor], layout: tuple[ParameterSpec, ...], dense: bool
    ) -> None:
        target = self.make_target(state)
        flats, new = target.bind(layout), changed(state)
        live = measured(flats, layout)
        assert live.ledger.total == digest_of(layout, state)
        staging = stage_tiles(live, tiles_between(live.space, state, new, go_whole=dense))
        assert_holds(flats, layout, state)
        target.check_unmoved()
        assert staging.commit() == digest_of(layout, new)
        target.check_unmoved()
        assert_holds(target.bind(layout), layout, new)  # in the engine, not only in what was bound
        staging.undo()
        assert_holds(target.bind(layout), layout, state)

    def test_moved_storage_is_noticed(
        self, state: dict[str, Tensor], layout: tuple[ParameterSpec, ...]
    ) -> None:
        for name in self.names:
            target = self.make_target(state)
            target.bind(layout)
            target.check_unmoved()
            self.replace_storage(name)
            with pytest.raises(TargetMoved):
                target.check_unmoved()
            assert_holds(target.bind(layout), layout, state)
            target.check_unmoved()

    def test_names_that_only_one_end_knows(
        self, state: dict[str, Tensor], layout: tuple[ParameterSpec, ...]
    ) -> None:
        target = self.make_target(state)
        with pytest.raises(LayoutMismatch, match=layout[0].name):
            target.bind(layout[1:])
        # What the sender has beyond this rank may be another rank's: it is not bound.
        flats = target.bind((STRANGER, *layout))
        assert set(flats) == set(range(1, len(layout) + 1))

    def test_another_shape_or_dtype_is_refused_by_name(
        self, state: dict[str, Tensor], layout: tuple[ParameterSpec, ...]
    ) -> None:
        target = self.make_target(state)
        first = layout[0]
        for other in (
            replace(first, shape=(*first.shape, 2)),
            replace(first, dtype=dtypes.BY_NAME["int64"]),
        ):
            with pytest.raises(LayoutMismatch, match=first.name):
                target.bind((other, *layout[1:]))


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights after a step that changed about half of the bits' owners, and at least one."""
    rng = np.random.default_rng(1)
    new = {}
    for name, tensor in state.items():
        mask = rng.random(tensor.numel()) < 0.5
        mask[-1] = True
        new[name] = flipped(tensor, mask, rng).view(tensor.dtype)
    return new


def digest_of(layout: tuple[ParameterSpec, ...], state: dict[str, Tensor]) -> int:
    """The digest of `state`."""
    flats = {number: Flat.of(state[spec.name]) for number, spec in enumerate(layout)}
    return measured(flats, layout).ledger.total


def assert_holds(
    flats: Mapping[int, Live], layout: tuple[ParameterSpec, ...], state: dict[str, Tensor]
) -> None:
    """The live weights have the bits of `state`."""
    for number, spec in enumerate(layout):
        wanted = Flat.of(state[spec.name]).read(0, spec.numel)
        assert torch.equal(flats[number].read(0, spec.numel), wanted), spec.name
