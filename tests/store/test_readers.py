"""Readers of a store: at every version bit-identical to the trainer, over the cheapest way."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from deltasync import ReceiverOptions
from deltasync.delta.bits import as_bits
from deltasync.delta.coding import Coding
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import (
    CallOrderError,
    DigestMismatch,
    DirtyReceiver,
    TransportClosed,
    TransportTimeout,
    VersionMissing,
)
from deltasync.store.receiver import StoreReceiver
from tests.store.raw import Stored
from tests.worlds.links import Model, bits_equal, random_model
from tests.worlds.published import Follower, Publisher, blank, matrix, state_of
from tests.worlds.stores import Place, local_place, memory_place, wait_until
from tests.worlds.strategies import same_bits
from tests.worlds.toy_engines import CHECKPOINT, SHAPES, Rank, rank_of

CODINGS: tuple[Coding, ...] = get_args(Coding)


@pytest.fixture
def trainer() -> Publisher:
    """Two versions, in memory."""
    made = Publisher(memory_place())
    made.publish(2)
    return made


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
        with reader.receiver.hold() as held:
            assert held.version == 4
        with pytest.raises(TransportTimeout, match="nothing newer than v4"):
            reader.receiver.stage(timeout_s=0.1)
        assert reader.receiver.fetch(timeout_s=0.1) == 4


@pytest.mark.parametrize("options", [None, ReceiverOptions(max_staged_bytes=0)])
def test_a_version_is_staged_while_the_old_one_serves(
    trainer: Publisher, options: ReceiverOptions | None
) -> None:
    """What is too large to stage is written in place."""
    with Follower(trainer.place, options=options) as reader:
        reader.fetch(1)
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


def test_what_is_not_there_is_waited_for_and_then_reported() -> None:
    place = memory_place()
    trainer = Publisher(place)
    with Follower(place) as reader, reader.receiver.follow(pause=nullcontext):
        trainer.publish()
        wait_until(lambda: reader.receiver.version == 1)
        assert reader.holds(trainer.states[1])
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


def test_an_engine_that_sleeps_is_not_touched(trainer: Publisher) -> None:
    with Follower(trainer.place) as reader:
        reader.fetch(1)
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
    for to, is_written in ((1, True), (2, False)):
        with Follower(trainer.place, more={"spool": tmp_path}) as reader:
            reader.stage(to)
            assert list(tmp_path.iterdir())
            if is_written:
                reader.receiver.commit()
        assert len(list(tmp_path.iterdir())) == (not is_written)


# The fewest bytes


def replace(model: nn.Linear) -> None:
    """Change so much that an anchor is the cheaper way."""
    with torch.no_grad():
        model.weight.normal_()


def replace_some(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[:28].normal_()


@pytest.mark.promise(
    "Cost",
    "A reader of a store fetches the fewest bytes that lead to a version, in whatever codec: "
    "the deltas that it has missed, as one commit, or an anchor and what follows.",
)
@pytest.mark.parametrize("coding", CODINGS)
def test_a_reader_far_behind_merges_deltas_or_takes_the_anchor_that_costs_less(
    coding: Coding,
) -> None:
    """Of some tiles all has changed, before and after others of their elements did."""
    trainer = Publisher(memory_place(), 5, coding, matrix(300))
    trainer.publish(4)
    trainer.publish(step=replace_some)
    trainer.publish(4)
    first = trainer.states[1]
    with Follower(trainer.place, model=matrix(300), holding=first) as reader:
        assert reader.stage()
        assert reader.fetched == sum(one.delta_bytes for one in trainer.stats.values())
        assert reader.fetched < trainer.stats[6].anchor_bytes
        assert reader.holds(first)
        assert reader.receiver.commit() == 9
        assert reader.holds(trainer.states[9])
        trainer.publish(2, step=replace)
        trainer.publish()
        assert reader.fetch() == 12
        assert reader.fetched == trainer.stats[11].anchor_bytes + trainer.stats[12].delta_bytes
        assert reader.holds(trainer.states[12])


def test_many_small_tensors_take_memory_by_their_elements() -> None:
    """As the scales of experts: one element each, and whole."""
    small = [torch.full((1,), float(n)) for n in range(1000)]
    model = nn.ParameterList([torch.zeros(1 << 19), *small])
    trainer = Publisher(memory_place(), compression="gap", model=model)
    trainer.publish()
    for _ in range(2):
        with torch.no_grad():
            for parameter in list(model)[1:]:
                parameter.add_(1)
        trainer.put()
    with Follower(trainer.place, model=blank(model), holding=trainer.states[1]) as reader:
        assert reader.fetch(1) == 1
        tracemalloc.start()
        reader.stage()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert reader.receiver.commit() == 3
        assert reader.holds(trainer.states[3])
    assert peak < 4 << 20


# Ranks that hold parts


def test_ranks_that_hold_parts_merge_deltas(tmp_path: Path) -> None:
    """Also of a parameter that has changed, and is as it was at the version held."""
    model = random_model(SHAPES, 0).bfloat16()
    trainer = Publisher(local_place(tmp_path), model=model, compression="gap")

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
