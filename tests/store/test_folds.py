"""Folded deltas: of every codec, what a diff of both ends says, and in the way of a reader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ModuleSource, ModuleTarget, Policy, SenderOptions
from deltasync.delta.bits import Flat, as_bits
from deltasync.delta.codecs.coding import Coding
from deltasync.errors import StoreRefused, StoreUnavailable
from deltasync.files.frame_file import FrameFile
from deltasync.store.besides import PublishOptions
from deltasync.store.catalogue import Run
from deltasync.store.folding import FoldedDeltas
from deltasync.store.manifest import Way
from deltasync.store.receiver import StoreReceiver
from deltasync.store.retention import gc
from deltasync.store.sender import PublishStats, StoreSender
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.sync.target.routed import RoutedTarget
from deltasync.testing.bits import flipped
from deltasync.transports.base import Frame
from tests.store.faulty import Choose, Faults, faulty
from tests.store.replay import fetched
from tests.store.stores import Place, memory_place, s3_place
from tests.strategies import SEEDS, same_bits, tensors
from tests.sync.harness import Model, bits_equal, random_model
from tests.sync.test_parts import CHECKPOINT, SHAPES, Rank, rank_of

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
        publishing=PublishOptions(**{"anchor_every": 100, "fold_every": 3} | more),
    )


def publish(sender: StoreSender, model: Bag, states: list[State]) -> list[PublishStats]:
    found = []
    for state in states:
        model.hold(state)
        found.append(sender.publish())
    return found


def folds(run: Run) -> dict[int, Way]:
    """By the version that they lead to."""
    return {
        version: way
        for version in run.versions()
        for way in run.ways(run.require(version))
        if way.kind == "fold"
    }


def run_of(place: Place) -> Run:
    return Run.open(place.url, "run", place.options)


def cheapest_bytes(run: Run, start: int | None, to: int) -> int:
    """The fewest bytes from one version to another, of all ways there are."""
    costs: dict[int | None, int] = {None: 0, start: 0}
    for version in range(1, to + 1):
        for way in run.ways(run.require(version)):
            if way.base in costs and version != start:
                cost = costs[way.base] + way.num_bytes
                costs[version] = min(cost, costs.get(version, cost))
    return costs[to]


@settings(deadline=None)
@given(
    versions=histories(),
    coding=st.sampled_from(CODINGS),
    fold_every=st.integers(2, 4),
    policy=st.builds(
        Policy,
        chunk_numel=st.integers(1, 40),
        dense_above=st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]),
    ),
    data=st.data(),
)
def test_a_fold_is_the_diff_of_its_ends_and_readers_take_the_cheapest_way(
    versions: list[State], coding: Coding, fold_every: int, policy: Policy, data: st.DataObject
) -> None:
    place, model = memory_place(), Bag(versions[0])
    sender = sender_of(model, place, coding, fold_every=fold_every, policy=policy)
    publish(sender, model, versions)
    run = run_of(place)
    for version, way in folds(run).items():
        assert way.base is not None
        assert_is_diff(run, way, versions[way.base - 1], versions[version - 1])
    engine = Bag(versions[0])
    with StoreReceiver(ModuleTarget(engine), place.url, run="run") as receiver:
        receiver.fetch(1, timeout_s=30)
        held: int | None = 1
        for to in data.draw(st.lists(st.integers(1, len(versions)), min_size=1, max_size=3)):
            before = receiver.progress.fetched_bytes
            receiver.fetch(to, timeout_s=30)
            assert engine.holds(versions[to - 1])
            if held is not None and to > held:
                moved_bytes = receiver.progress.fetched_bytes
                assert moved_bytes <= 1.05 * cheapest_bytes(run, held, to), before
            held = to


def assert_is_diff(
    run: Run, way: Way, old: State, new: State, unknown: Collection[str] = ()
) -> None:
    """A fold leads from one state to the other, and writes what differs and no more.

    But for dense runs, of which most differs, one element of a parameter that is as it was, and
    parameters of which the writer did not know the old bits.
    """
    base, specs = Bag(old), run.layout(run.require(way.base or 0).manifest.layout_hash)
    flats = {n: Flat.of(base.get_buffer(spec.name)) for n, spec in enumerate(specs)}
    folded = FoldedDeltas(flats)
    folded.take(frames_of(run, way))
    for number, spec in enumerate(specs):
        differs = (as_bits(old[spec.name]) != as_bits(new[spec.name])).reshape(-1)
        wrote = torch.zeros_like(differs)
        for parameter, one in folded.all_runs() if number in folded.changed else ():
            if parameter == number:
                assert one.bits is not None
                where = torch.arange(one.start, one.stop)
                wrote[where if one.indices is None else one.positions()] = True
                one.write(flats[number], one.bits)
        assert not (differs & ~wrote).any()
        if spec.name not in unknown:
            assert int((wrote & ~differs).sum()) <= max(1, int(differs.sum()))
    assert base.holds(new)


def frames_of(run: Run, way: Way) -> Iterator[Frame]:
    with TemporaryDirectory() as folder:
        yield from FrameFile(fetched(run, way.files[0], Path(folder)))


def large_states(count: int, *, density: float = 0.01, numel: int = 20_000) -> list[State]:
    """Versions of which most are near the one before."""
    rng = np.random.default_rng(0)
    bits = (0.02 * rng.standard_normal(numel)).astype(np.float32).view(np.uint32) >> 16
    states = []
    for _ in range(count):
        states.append({"w": torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16)})
        bits = bits + (rng.random(numel) < density)
    return states


def fetch_from(place: Place, held: State, to: int) -> tuple[Bag, int]:
    """(an engine that held a state and fetched a version, the bytes that came)."""
    engine = Bag(held)
    with StoreReceiver(ModuleTarget(engine), place.url, run="run", store=place.options) as receiver:
        assert receiver.fetch(to, timeout_s=30) == to
        return engine, receiver.progress.fetched_bytes


@pytest.mark.parametrize("coding", CODINGS)
def test_folds_are_coded_as_their_deltas(coding: Coding) -> None:
    place, states = memory_place(), large_states(9)
    model = Bag(states[0])
    stats = publish(sender_of(model, place, coding, fold_every=8), model, states)
    (way,) = folds(run_of(place)).values()
    assert (way.base, stats[-1].fold_bytes) == (1, way.num_bytes)
    name = {"none": "zstd", "gap": "gap+ulp"}.get(coding, coding)
    assert any(one.startswith(name) for one in way.codecs), way.codecs
    assert way.num_bytes < 0.75 * sum(one.delta_bytes for one in stats)
    engine, num_bytes = fetch_from(place, states[0], 9)
    assert engine.holds(states[8])
    assert num_bytes == way.num_bytes


def test_a_reader_in_the_middle_of_a_fold_takes_deltas_and_then_folds() -> None:
    place, states = memory_place(), large_states(10)
    model = Bag(states[0])
    publish(sender_of(model, place), model, states)
    run = run_of(place)
    assert {to: way.base for to, way in folds(run).items()} == {4: 1, 7: 4, 10: 7}
    engine, num_bytes = fetch_from(place, states[2], 10)
    assert engine.holds(states[9])
    assert num_bytes == cheapest_bytes(run, 3, 10)
    delta = run.require(4).manifest.ways[0].num_bytes
    assert num_bytes == delta + sum(way.num_bytes for to, way in folds(run).items() if to > 4)


def test_a_trainer_that_starts_again_folds_what_it_publishes_itself() -> None:
    place, states = memory_place(), large_states(8)
    model = Bag(states[0])
    publish(sender_of(model, place), model, states[:3])
    again = sender_of(model, place)
    assert again.publish().kind == "unchanged"
    publish(again, model, states[3:])
    assert {to: way.base for to, way in folds(run_of(place)).items()} == {6: 3}
    engine, _ = fetch_from(place, states[0], 8)
    assert engine.holds(states[7])


@pytest.fixture
def broken(s3: str) -> Iterator[tuple[Place, Faults]]:
    """A bucket through a proxy, and what the proxy does."""
    with faulty(s3) as (endpoint, faults):
        yield s3_place(s3, via=endpoint, timeout_s=2.0, retries=0, retry_timeout_s=2.0), faults


def refuse(part: str) -> Choose:
    """Fail to write objects with this in their key."""
    return lambda method, path: "error" if method != "GET" and part in path else None


@pytest.mark.parametrize("part", ["-fold-", "/ways/"])
def test_a_fold_that_fails_leads_to_the_next_version(
    broken: tuple[Place, Faults], part: str
) -> None:
    place, faults = broken
    states = large_states(6)
    model = Bag(states[0])
    sender = sender_of(model, place)
    publish(sender, model, states[:3])
    faults.choose = refuse(part)
    (stats,) = publish(sender, model, states[3:4])
    assert (stats.version, stats.fold_bytes) == (4, 0)
    assert "fold: StoreUnavailable" in stats.postponed
    faults.choose = lambda method, path: None
    stats, last = publish(sender, model, states[4:])
    assert (stats.postponed, stats.fold_bytes > 0, last.fold_bytes) == ("", True, 0)
    run = run_of(place)
    assert {to: way.base for to, way in folds(run).items()} == {5: 1}
    engine, num_bytes = fetch_from(place, states[0], 6)
    assert engine.holds(states[5])
    assert (
        num_bytes
        == cheapest_bytes(run, 1, 6)
        < sum(run.require(to).manifest.ways[0].num_bytes for to in range(2, 7))
    )


@pytest.mark.parametrize("part", ["-delta-", "/manifests/"])
@pytest.mark.parametrize("density", [0.01, 0.9])
def test_a_version_that_fails_is_in_the_fold_as_it_is_published(
    broken: tuple[Place, Faults], part: str, density: float
) -> None:
    """What goes dense was written to the snapshot by then: its old bits are gone."""
    place, faults = broken
    states = large_states(5, density=density)
    model = Bag(states[0])
    sender = sender_of(model, place)
    publish(sender, model, states[:2])
    for attempt in range(2):
        faults.choose = refuse(part)
        model.hold(states[2 + attempt])
        with pytest.raises((StoreUnavailable, StoreRefused)):
            sender.publish()
    faults.choose = lambda method, path: None
    published = publish(sender, model, states[3:])[-1].version
    run = run_of(place)
    for version, way in folds(run).items():
        engine, _ = fetch_from(place, states[0], version)
        assert engine.holds(states[4] if version == published else states[3])
        assert way.base == 1
    assert folds(run)


def test_weights_that_were_overwritten_before_they_were_sent_are_folded() -> None:
    """Streamed weights keep no old bits of what goes dense."""
    place, states = memory_place(), large_states(4, density=0.02)
    dense = torch.randint(0, 256, (5000,), dtype=torch.uint8)  # whose steps take no more bytes
    weights = StreamedWeights(SenderOptions(stream_id="run", compression="gap"))
    sender = StoreSender(weights, place.url, publishing=PublishOptions(fold_every=3))
    for number, state in enumerate(states):
        state["d"] = moved(dense, 1.0, number) if number == 2 else dense
        weights.take(state.items())
        sender.publish()
    (way,) = folds(run_of(place)).values()
    assert_is_diff(run_of(place), way, states[0], states[3], unknown={"d"})
    engine, _ = fetch_from(place, states[0], 4)
    assert engine.holds(states[3])


def test_what_takes_too_much_memory_is_not_folded_and_what_follows_is() -> None:
    place, quiet = memory_place(), large_states(8, density=0.001)
    states = [*quiet[:2], *large_states(8, density=0.5)[2:4], *quiet[4:]]
    model = Bag(states[0])
    stats = publish(sender_of(model, place, fold_max_bytes=5000), model, states)
    run = run_of(place)
    assert not any(one.postponed for one in stats)
    assert [way.base for way in folds(run).values()] == [5]
    for start, to in ((0, 8), (4, 8), (2, 7)):
        engine, num_bytes = fetch_from(place, states[start], to)
        assert engine.holds(states[to - 1])
        assert num_bytes == cheapest_bytes(run, start + 1, to)


def test_the_same_elements_take_memory_once() -> None:
    place, state = memory_place(), large_states(1)[0]
    states = [state]
    for _ in range(8):
        bits = as_bits(states[-1]["w"]).clone()
        bits[::50] += 1
        states.append({"w": bits.view(torch.bfloat16)})
    model = Bag(state)
    sender = sender_of(model, place, fold_every=8, fold_max_bytes=400 * 6)
    assert publish(sender, model, states)[-1].fold_bytes > 0


@pytest.mark.parametrize("coding", ["none", "gap", "block"])
def test_ranks_that_hold_parts_fetch_folds(tmp_path: Path, coding: Coding) -> None:
    """Also of a parameter that has changed, and is as it was at the fold's base."""
    model, generator = random_model(SHAPES, 0).bfloat16(), torch.Generator().manual_seed(0)
    place = Place(str(tmp_path))
    sender = sender_of(model, place, coding, fold_every=2)
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
    run = run_of(place)
    (way,) = folds(run).values()
    for facts in list(run.objects.listed("objects")):  # the model is so small that anchors pay
        if facts.key != way.files[0].key and not facts.key.startswith("objects/0000000000000001"):
            run.objects.delete(facts.key)
    for rank in range(2):
        engine = Rank(rank)
        with StoreReceiver(
            RoutedTarget(engine, CHECKPOINT), place.url, run="run", rank=rank, world=2
        ) as receiver:
            receiver.fetch(1, timeout_s=30)
            receiver.fetch(3, timeout_s=30)
            assert receiver.progress.fetched_bytes == way.num_bytes
        expected = Model(states[2])
        assert bits_equal(engine, rank_of(expected, rank))


def test_s11_folds_go_with_their_versions_and_stay_with_them(place: Place) -> None:
    states = large_states(9)
    model = Bag(states[0])
    publish(sender_of(model, place, anchor_every=4), model, states)
    before = folds(run_of(place))
    assert sorted(before) == [4, 7]
    gc(place.url, "run", keep=5, options=place.options)
    run = run_of(place)
    assert run.versions() == [5, 6, 7, 8, 9]
    assert folds(run) == {7: before[7]}
    engine, num_bytes = fetch_from(place, states[4], 9)
    assert engine.holds(states[8])
    assert num_bytes == sum(run.require(to).manifest.ways[0].num_bytes for to in range(6, 10))


@pytest.mark.parametrize("inflight", [None, 0])
def test_kernels_keep_the_old_bits_that_they_have(inflight: int | None) -> None:
    """They overwrite those of dense rows, and of all rows beyond the memory for changes."""
    place, states = memory_place(), large_states(4, numel=3000)
    for number, state in enumerate(states):
        state["d"] = torch.full((40,), number, dtype=torch.uint8)
    options = SenderOptions(
        stream_id="run", compression="gap", kernels="triton", max_inflight_bytes=inflight
    )
    model = Bag(states[0])
    sender = StoreSender(
        ModuleSource(model), place.url, options=options, publishing=PublishOptions(fold_every=3)
    )
    publish(sender, model, states)
    (way,) = folds(run_of(place)).values()
    assert ("gap+ulp" in way.codecs) == (inflight is None), way.codecs
    engine, num_bytes = fetch_from(place, states[0], 4)
    assert engine.holds(states[3])
    assert num_bytes == way.num_bytes


def test_a_fold_that_is_damaged_is_not_the_only_way() -> None:
    place, states = memory_place(), large_states(4)
    model = Bag(states[0])
    publish(sender_of(model, place), model, states)
    run = run_of(place)
    (way,) = folds(run).values()
    data = bytearray(run.objects.get_range(way.files[0].key, 0, way.num_bytes))
    for at in (0, len(data) // 2, len(data) - 1):
        data[at] ^= 1
        run.objects.put(way.files[0].key, bytes(data))
        engine, _ = fetch_from(place, states[0], 4)
        assert engine.holds(states[3])


def test_folds_can_be_declined() -> None:
    for every in (0, 1):
        place, states = memory_place(), large_states(4)
        model = Bag(states[0])
        publish(sender_of(model, place, fold_every=every), model, states)
        assert not folds(run_of(place))
