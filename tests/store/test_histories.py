"""Any history, in any codec: a reader merges what it has missed into one commit, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, Policy, SenderOptions
from deltasync.delta.bits import as_bits
from deltasync.delta.codecs.coding import Coding
from deltasync.engines.routed import RoutedTarget
from deltasync.store.anchors import PublishOptions
from deltasync.store.catalogue import Run
from deltasync.store.receiver import StoreReceiver
from deltasync.store.sender import StoreSender
from deltasync.testing.bits import flipped
from tests.worlds.links import Model, bits_equal, random_model
from tests.worlds.stores import Place, memory_place
from tests.worlds.strategies import SEEDS, same_bits, tensors
from tests.worlds.toy_engines import CHECKPOINT, SHAPES, Rank, rank_of

CODINGS: tuple[Coding, ...] = get_args(Coding)
State = dict[str, Tensor]


class Bag(nn.Module):
    """Tensors of any dtype."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor.clone(memory_format=torch.contiguous_format))

    def hold(self, state: State) -> None:
        """Overwrite all of them."""
        for name, tensor in state.items():
            as_bits(self.get_buffer(name)).copy_(as_bits(tensor))

    def holds(self, state: State) -> bool:
        return all(same_bits(self.get_buffer(name), tensor) for name, tensor in state.items())


def moved(tensor: Tensor, density: float, seed: int) -> Tensor:
    """A copy of which such a share has other bits."""
    rng = np.random.default_rng(seed)
    return flipped(tensor, rng.random(tensor.numel()) < density, rng).view(tensor.dtype)


@st.composite
def histories(draw: st.DrawFn) -> list[State]:
    """Versions of a model; parameters move a little, a lot, not at all, or back to an older one."""
    first = {f"w{n}": draw(tensors()) for n in range(draw(st.integers(1, 4)))}
    assume(any(tensor.numel() for tensor in first.values()))  # others are refused
    versions = [first]
    for _ in range(draw(st.integers(2, 8))):
        state = State()
        for name, tensor in versions[-1].items():
            if draw(st.booleans()):
                state[name] = draw(st.sampled_from(versions))[name]
            else:
                share = draw(st.sampled_from([0.0, 0.02, 0.3, 0.8, 1.0]))
                state[name] = moved(tensor, share, draw(SEEDS))
        versions.append(state)
    return versions


def sender_of(model: nn.Module, place: Place, coding: Any = "gap", **more: Any) -> StoreSender:
    policy = more.pop("policy", Policy())
    options = SenderOptions(stream_id="run", compression=coding, policy=policy)
    return StoreSender(
        ModuleSource(model),
        place.url,
        options=options,
        store=place.options,
        publishing=PublishOptions(**{"anchor_every": 100} | more),
    )


def fewest_bytes(run: Run, held: int | None, to: int) -> int:
    """From one version to a later one, of all ways there are."""
    costs: dict[int | None, int] = {None: 0, held: 0}  # by where a way begins
    for version in range(1, to + 1):
        for way in run.ways(run.require(version)):
            base = None if way.kind == "anchor" else version - 1
            if base in costs and version != held:
                cost = costs[base] + way.num_bytes
                costs[version] = min(cost, costs.get(version, cost))
    return costs[to]


@pytest.mark.promise(
    "Cost",
    "A reader of a store fetches the fewest bytes that lead to a version, in whatever codec: "
    "the deltas that it has missed, as one commit, or an anchor and what follows.",
)
@settings(deadline=None)
@given(
    versions=histories(),
    coding=st.sampled_from(CODINGS),
    anchor_every=st.integers(2, 9),
    policy=st.builds(
        Policy,
        chunk_numel=st.integers(1, 40),
        dense_above=st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]),
    ),
    data=st.data(),
)
def test_readers_of_any_history_take_the_fewest_bytes(
    versions: list[State], coding: Coding, anchor_every: int, policy: Policy, data: st.DataObject
) -> None:
    place, model = memory_place(), Bag(versions[0])
    sender = sender_of(model, place, coding, anchor_every=anchor_every, policy=policy)
    for state in versions:
        model.hold(state)
        sender.publish()
    run = Run.open(place.url, "run", place.options)
    engine = Bag(versions[0])
    with StoreReceiver(ModuleTarget(engine), place.url, run="run") as receiver:
        receiver.fetch(1, timeout_s=30)
        held = 1
        for to in data.draw(st.lists(st.integers(1, len(versions)), min_size=1, max_size=3)):
            receiver.fetch(to, timeout_s=30)
            assert engine.holds(versions[to - 1])
            if to > held:
                # Anchors differ by a few bytes, and the nearest one is taken.
                assert receiver.progress.fetched_bytes <= 1.05 * fewest_bytes(run, held, to)
            held = to


@pytest.mark.promise(
    "Cost",
    "A reader of a store fetches the fewest bytes that lead to a version, in whatever codec: "
    "the deltas that it has missed, as one commit, or an anchor and what follows.",
)
@pytest.mark.parametrize("coding", CODINGS)
def test_a_reader_8_versions_behind_merges_8_deltas_into_one_commit(coding: Coding) -> None:
    place, states = memory_place(), large_states(9)
    model, engine = Bag(states[0]), Bag(states[0])
    sender, num_bytes = sender_of(model, place, coding), 0
    for state in states:
        model.hold(state)
        num_bytes += sender.publish().delta_bytes
    with StoreReceiver(ModuleTarget(engine), place.url, run="run") as receiver:
        assert receiver.stage(timeout_s=30)
        assert receiver.progress.fetched_bytes == num_bytes
        assert engine.holds(states[0])
        assert receiver.commit() == 9
    assert engine.holds(states[8])


def large_states(count: int, *, density: float = 0.01, numel: int = 20_000) -> list[State]:
    """Versions of which most are near the one before."""
    rng = np.random.default_rng(0)
    bits = (0.02 * rng.standard_normal(numel)).astype(np.float32).view(np.uint32) >> 16
    states = []
    for _ in range(count):
        states.append({"w": torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16)})
        bits = bits + (rng.random(numel) < density)
    return states


@pytest.mark.promise(
    "Cost",
    "A reader of a store fetches the fewest bytes that lead to a version, in whatever codec: "
    "the deltas that it has missed, as one commit, or an anchor and what follows.",
)
@pytest.mark.parametrize("coding", ["none", "gap", "block"])
def test_ranks_that_hold_parts_merge_deltas(tmp_path: Path, coding: Coding) -> None:
    """Also of a parameter that has changed, and is as it was at the version held."""
    model, generator = random_model(SHAPES, 0).bfloat16(), torch.Generator().manual_seed(0)
    place = Place(str(tmp_path))
    sender = sender_of(model, place, coding)
    states = []
    for number in range(3):
        for name, weights in model.named_parameters():
            mask = torch.rand(weights.shape, generator=generator) < (0.5 if number else 0.0)
            if name in ("q", "kv", "norm"):
                mask[:] = False
                mask[0] = number > 0
            as_bits(weights.data)[mask] ^= 1
        sender.publish()
        states.append({name: one.detach().clone() for name, one in model.state_dict().items()})
    assert same_bits(states[0]["q"], states[2]["q"])
    run = Run.open(place.url, "run", place.options)
    for facts in list(run.objects.listed("objects")):  # the model is so small that anchors pay
        if "-anchor-" in facts.key and "0000000000000001" not in facts.key:
            run.objects.delete(facts.key)
    deltas = sum(run.require(to).manifest.way.num_bytes for to in (2, 3))
    for rank in range(2):
        engine = Rank(rank)
        with StoreReceiver(
            RoutedTarget(engine, CHECKPOINT), place.url, run="run", rank=rank, world=2
        ) as receiver:
            receiver.fetch(1, timeout_s=30)
            receiver.fetch(3, timeout_s=30)
            assert receiver.progress.fetched_bytes == deltas
        assert bits_equal(engine, rank_of(Model(states[2]), rank))
