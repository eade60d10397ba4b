"""Readers of a store: at every version bit-identical to the trainer, over the cheapest way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync import ReceiverOptions
from deltasync.delta.bits import as_bits
from deltasync.delta.coding import Coding
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    DigestMismatch,
    DirtyReceiver,
    TargetMoved,
    TransportClosed,
    TransportTimeout,
    VersionMissing,
)
from deltasync.files.classes import codec as class_codec
from deltasync.store.catalogue import Published, Run
from deltasync.store.receiver import StoreReceiver
from deltasync.store.routes import find_route
from tests.store.raw import Stored
from tests.worlds.bits import flipped
from tests.worlds.links import Model, bits_equal, random_model
from tests.worlds.published import (
    Follower,
    Publisher,
    State,
    state_of,
)
from tests.worlds.stores import Link, Place, local_place, memory_place, wait_until
from tests.worlds.strategies import SEEDS, same_bits, tensors
from tests.worlds.toy_engines import CHECKPOINT, SHAPES, Rank, rank_of

CODINGS: tuple[Coding, ...] = get_args(Coding)


@pytest.fixture
def trainer() -> Publisher:
    """Two versions, in memory."""
    made = Publisher(memory_place())
    made.publish(2)
    return made


@pytest.fixture
def reader(trainer: Publisher) -> Iterator[Follower]:
    """Of the first one."""
    with Follower(trainer.place) as made:
        made.fetch(1)
        yield made


def weight_of(reader: Follower) -> Tensor:
    return reader.model.get_parameter("1.weight")


def test_a_reader_begins_at_the_version_that_its_weights_have(trainer: Publisher) -> None:
    trainer.publish(2)
    with Follower(trainer.place, holding=trainer.states[2]) as reader:
        assert reader.fetch() == 4
        assert reader.fetched == trainer.stats[3].delta_bytes + trainer.stats[4].delta_bytes
        assert reader.holds(trainer.states[4])
    with Follower(trainer.place, holding=trainer.states[4]) as reader:
        assert not reader.stage()
        assert (reader.receiver.version, reader.receiver.progress.total_bytes) == (4, 0)
        with pytest.raises(TransportTimeout, match="nothing newer than v4"):
            reader.receiver.stage(timeout_s=0.1)
        assert reader.receiver.fetch(timeout_s=0.1) == 4


@pytest.mark.parametrize("options", [None, ReceiverOptions(max_staged_bytes=0)])
@pytest.mark.parametrize("start", [None, 1])
def test_a_version_is_staged_while_the_old_one_serves(
    trainer: Publisher, start: int | None, options: ReceiverOptions | None
) -> None:
    """What is too large to stage is written in place."""
    with Follower(trainer.place, options=options) as reader:
        if start is not None:
            reader.fetch(start)
        before = state_of(reader.model)
        assert reader.stage()
        assert reader.holds(before)
        assert reader.receiver.commit() == 2
        assert reader.holds(trainer.states[2])


def test_half_written_weights_are_written_as_a_whole_whatever_their_digest(
    trainer: Publisher,
) -> None:
    """What the engine derives from them may be of another version."""
    more = {"half_written": True}
    with Follower(trainer.place, more=more, holding=trainer.states[2]) as reader:
        assert reader.receiver.is_dirty
        assert reader.fetch() == 2
        assert reader.holds(trainer.states[2])
        assert reader.fetched > sum(one.nbytes for one in reader.model.parameters())


def test_calls_in_the_wrong_order_are_refused(trainer: Publisher) -> None:
    with Follower(trainer.place) as reader:
        assert reader.stage(1)
        with pytest.raises(CallOrderError, match="another version is staged"):
            reader.stage(2)
        reader.receiver.discard()
        with pytest.raises(CallOrderError, match="nothing is staged"):
            reader.receiver.commit()
        assert reader.fetch(2) == 2


def test_what_is_not_there_is_waited_for_and_then_reported() -> None:
    place = memory_place()
    trainer = Publisher(place)
    with Follower(place) as reader, reader.receiver.follow() as follower:
        assert not follower.wait_staged(timeout_s=0.1)
        trainer.publish()
        assert follower.wait_staged(timeout_s=30)
        assert follower.commit() == 1
    with Follower(place) as reader:
        with pytest.raises(VersionMissing, match="no v7"):
            reader.receiver.fetch(7, timeout_s=0.05)
        later = threading.Timer(0.2, trainer.publish)
        later.start()
        assert reader.fetch(2) == 2
        later.join()
        assert reader.holds(trainer.states[2])
        later = threading.Timer(0.2, reader.receiver.close)
        later.start()
        with pytest.raises(TransportClosed):
            reader.fetch(3)
        later.join()


def test_storage_that_has_moved_is_not_written(trainer: Publisher, reader: Follower) -> None:
    reader.stage()
    with torch.no_grad():
        weight_of(reader).data = weight_of(reader).data.clone()
    with pytest.raises(TargetMoved):
        reader.receiver.commit()
    assert reader.holds(trainer.states[1])
    assert reader.fetch() == 2
    assert reader.holds(trainer.states[2])


def test_weights_that_somebody_else_wrote_are_healed_or_measured_again(trainer: Publisher) -> None:
    with Follower(trainer.place, options=ReceiverOptions(scrub_every=1)) as reader:
        reader.fetch(1)
        with torch.no_grad():
            weight_of(reader).zero_()
        with pytest.raises(DirtyReceiver, match="changed that no sync touched"):
            reader.fetch()
        with pytest.raises(DirtyReceiver):
            reader.receiver.check_serving()
        assert reader.fetch() == 2
        assert reader.holds(trainer.states[2])
        reader.model.load_state_dict(trainer.states[1])
        reader.receiver.invalidate()  # which reports it
        assert reader.receiver.version is None
        assert reader.fetch() == 2
        assert reader.holds(trainer.states[2])


def test_an_engine_that_sleeps_is_not_touched(trainer: Publisher, reader: Follower) -> None:
    reader.stage()
    reader.receiver.detach()
    with pytest.raises(CallOrderError):
        reader.receiver.commit()
    with pytest.raises(TransportTimeout, match="detached"):
        reader.receiver.stage(timeout_s=0.05)
    with torch.no_grad():
        weight_of(reader).zero_()
    reader.receiver.attach()
    assert reader.fetch() == 2
    assert reader.holds(trainer.states[2])


def test_nothing_is_left_behind_but_what_was_not_written(
    trainer: Publisher, tmp_path: Path
) -> None:
    for to, is_written in ((1, True), (2, False), (2, True)):
        with Follower(trainer.place, more={"spool": tmp_path}) as reader:
            reader.stage(to)
            assert list(tmp_path.iterdir())
            if is_written:
                reader.receiver.commit()
        assert len(list(tmp_path.iterdir())) == (not is_written)
    with (
        Follower(trainer.place, more={"spool": tmp_path / "none"}) as reader,
        pytest.raises(ConfigError, match="none"),
    ):
        reader.fetch()


def test_an_engine_follows_and_commits_in_its_pauses(trainer: Publisher) -> None:
    pauses = list[int | None]()

    @contextmanager
    def pause() -> Iterator[None]:
        pauses.append(held.receiver.version)
        yield

    with Follower(trainer.place) as held, held.receiver.follow(pause=pause):
        for version in (2, 3):
            wait_until(lambda version=version: held.receiver.version == version)
            assert held.holds(trainer.states[version])
            trainer.publish()
    assert pauses[:2] == [None, 2]


# The fewest bytes


class Bag(nn.Module):
    """Tensors of any dtype."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor.clone(memory_format=torch.contiguous_format))

    def hold(self, state: State) -> None:
        for name, tensor in state.items():
            as_bits(self.get_buffer(name)).copy_(as_bits(tensor))


def moved(tensor: Tensor, density: float, seed: int) -> Tensor:
    """A copy of which such a share has other bits."""
    rng = np.random.default_rng(seed)
    return flipped(tensor, rng.random(tensor.numel()) < density, rng).view(tensor.dtype)


@st.composite
def histories(draw: st.DrawFn) -> list[State]:
    """Versions of a model; parameters move a little, a lot, not at all, or back to an older one."""
    first = {f"w{n}": draw(tensors()) for n in range(draw(st.integers(1, 4)))}
    assume(any(tensor.numel() for tensor in first.values()))  # others are refused
    versions: list[State] = [first]
    for _ in range(draw(st.integers(2, 5))):
        state = dict[str, Tensor]()
        for name, tensor in versions[-1].items():
            if draw(st.booleans()):
                state[name] = draw(st.sampled_from(versions))[name]
            else:
                share = draw(st.sampled_from([0.0, 0.02, 0.3, 0.8, 1.0]))
                state[name] = moved(tensor, share, draw(SEEDS))
        versions.append(state)
    return versions


def published(versions: list[State], **how: object) -> Publisher:
    """A run of these versions, in memory."""
    made = Publisher(memory_place(), model=Bag(versions[0]), **how)  # type: ignore[arg-type]
    for state in versions:
        made.model.hold(state)  # type: ignore[operator]
        made.put()
    return made


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
    anchor_every=st.integers(2, 6),
    least=st.sampled_from([1, 64]),
    data=st.data(),
)
def test_readers_of_any_history_take_the_fewest_bytes(
    versions: list[State], coding: Coding, anchor_every: int, least: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(class_codec, "LEAST", least)
        made = published(versions, anchor_every=anchor_every, compression=coding)
    run = Run.open(made.place.url)
    with Follower(made.place, model=Bag(versions[0])) as reader:
        held = reader.fetch(1)
        for to in data.draw(st.lists(st.integers(1, len(versions)), min_size=1, max_size=2)):
            reader.fetch(to)
            assert reader.holds(versions[to - 1])
            if to > held:
                # Anchors differ by a few bytes, and the nearest one is taken.
                assert reader.fetched <= 1.05 * fewest_bytes(run, held, to)
            held = to


def large_states(count: int) -> list[State]:
    """Versions of which each is near the one before, but for a part, now and then."""
    states: list[State] = [{n: torch.randn(k).bfloat16() for n, k in (("w", 20_000), ("v", 200))}]
    for seed in range(1, count):
        shares = {"w": 0.01, "v": 1.0 if seed % 3 else 0.05}
        states.append({n: moved(states[-1][n], share, seed) for n, share in shares.items()})
    return states


@pytest.mark.promise(
    "Cost",
    "A reader of a store fetches the fewest bytes that lead to a version, in whatever codec: "
    "the deltas that it has missed, as one commit, or an anchor and what follows.",
)
@pytest.mark.parametrize("coding", CODINGS)
def test_a_reader_8_versions_behind_merges_8_deltas_into_one_commit(coding: Coding) -> None:
    """An anchor that costs more is passed by."""
    states = large_states(9)
    made = published(states, compression=coding, anchor_every=5)
    assert made.stats[6].anchor_bytes
    with Follower(made.place, model=Bag(states[0])) as reader:
        assert reader.stage()
        assert reader.fetched == sum(one.delta_bytes for one in made.stats.values())
        assert reader.holds(states[0])
        assert reader.receiver.commit() == 9
        assert reader.holds(states[8])
    assert made.stats[9].compression == coding
    run = Run.open(made.place.url)
    (file,) = run.require(9).manifest.way.files
    frames = bytes(run.objects.get_range(file.key, 0, file.bytes))
    assert b'"compression":"%s"' % coding.encode() in frames


def test_few_manifests_are_read_of_versions_that_no_reader_can_hold(link: Link) -> None:
    trainer = Publisher(link.near, anchor_every=5)
    trainer.publish()
    asked = list[tuple[str, str]]()
    with Follower(link.far) as reader:
        reader.fetch()
        trainer.publish(40)
        link.faults.choose = lambda method, path: asked.append((method, path))
        assert reader.fetch() == 41
        assert reader.holds(trainer.states[41])
    assert len([path for _, path in asked if "/manifests/" in path]) < 20
    assert {method for method, _ in asked} <= {"GET", "HEAD"}, "readers write nothing"
    run = Run.open(link.near.url, link.near.options)
    for oldest in (39, 0):
        seen = list[int]()

        def holds(one: Published, seen: list[int] = seen) -> bool:
            seen.append(one.version)
            return False

        route = find_route(run, run.require(41), holds, oldest=oldest)
        assert (route.base, route.steps[0].way.kind) == (None, "anchor")
        assert (min(seen) == 39) == bool(oldest)


# Ranks that hold parts


@pytest.mark.promise(
    "Cost",
    "A reader of a store fetches the fewest bytes that lead to a version, in whatever codec: "
    "the deltas that it has missed, as one commit, or an anchor and what follows.",
)
@pytest.mark.parametrize("coding", ["none", "gap"])
def test_ranks_that_hold_parts_merge_deltas(tmp_path: Path, coding: Coding) -> None:
    """Also of a parameter that has changed, and is as it was at the version held."""
    trainer = Publisher(
        local_place(tmp_path), model=random_model(SHAPES, 0).bfloat16(), compression=coding
    )

    def step(model: nn.Module) -> None:
        for name, weights in model.named_parameters():
            mask = torch.rand(weights.shape) < 0.5
            if name in ("q", "kv", "norm"):
                mask[:] = False
                mask[0] = True
            as_bits(weights.data)[mask] ^= 1

    trainer.publish(3, step=step)
    assert same_bits(trainer.states[1]["q"], trainer.states[3]["q"])
    for path in Stored(tmp_path, {}).run.glob("objects/*-anchor-*"):
        if "0000000000000001" not in path.name:  # the model is so small that anchors pay
            next(path.iterdir()).unlink()
    deltas = sum(trainer.stats[version].delta_bytes for version in (2, 3))
    for rank in range(2):
        engine = Rank(rank)
        with rank_reader(engine, trainer.place) as receiver:
            for to in (1, 3, 2):
                receiver.fetch(to, timeout_s=30)
                state = dict(trainer.states[to])
                assert bits_equal(engine, rank_of(Model(state), rank))
                assert to != 3 or receiver.progress.fetched_bytes == deltas


def rank_reader(engine: Rank, place: Place) -> StoreReceiver:
    return StoreReceiver(RoutedTarget(engine, CHECKPOINT), place.url, rank=engine.rank, world=2)


@pytest.mark.parametrize(
    ("name", "why"),
    [("q", "brings no bytes for it"), ("kv", "would not be what"), ("last", None)],
)
def test_a_change_without_bytes_is_refused_by_a_rank_that_holds_it(
    tmp_path: Path, name: str, why: str | None
) -> None:
    """And matters to no rank without it."""
    trainer = Publisher(local_place(tmp_path), model=random_model(SHAPES, 0).bfloat16())
    trainer.publish(2, step=lambda model: model.get_parameter("o").data.add_(1))
    stored, engine = Stored(tmp_path, trainer.states), Rank(0)
    number = [entry[0][0] for entry in stored.layout(2)].index(name)
    changed = sorted([*stored.read(2)["changed"], [number, "f" * 16]])
    assert len(changed) == 2
    stored.alter(2, changed=changed)
    stored.anchor(2).unlink()  # which pays, as the model is so small
    with rank_reader(engine, trainer.place) as receiver:
        receiver.fetch(1, timeout_s=10)
        with pytest.raises(DigestMismatch, match=why) if why else nullcontext():
            receiver.fetch(2, timeout_s=10)
        assert not receiver.is_dirty
    assert bits_equal(engine, rank_of(Model(dict(trainer.states[1 if why else 2])), 0))
