"""Readers of a store: at every version bit-identical to the trainer, over the cheapest way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync import ModuleTarget, ReceiverOptions, StagingThread, WeightReceiver, WeightSender
from deltasync.delta.codecs.known import ROW_CODECS
from deltasync.errors import (
    CallOrderError,
    ConfigError,
    DirtyReceiver,
    RunUnknown,
    TargetMoved,
    TransportClosed,
    TransportTimeout,
    VersionMissing,
)
from deltasync.store.onward import CopiedSource
from deltasync.store.receiver import StoreReceiver
from deltasync.store.sender import PublishStats
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import inprocess
from deltasync.wire.codecs import IndexCodec
from tests.worlds.published import RUN, Follower, Publisher, change, small_model, state_of
from tests.worlds.stores import Place, local_place, memory_place, wait_until
from tests.worlds.strategies import same_bits


def weight_of(reader: Follower) -> Tensor:
    return reader.model[1].get_parameter("weight")


def test_every_version_arrives_bit_for_bit(place: Place) -> None:
    trainer = Publisher(place, anchor_every=3)
    trainer.publish(7)
    for to in (1, 2, 5, 7, 4, 6, 3):
        reader = Follower(place)
        assert reader.receiver.fetch(to, timeout_s=30) == to
        assert reader.holds(trainer.states[to])
        reader.receiver.close()


def test_one_reader_goes_forth_and_back(place: Place) -> None:
    trainer = Publisher(place, anchor_every=3)
    trainer.publish(7)
    reader = Follower(place)
    for to in (3, 7, 2, 6, 6, 7):
        assert reader.receiver.fetch(to, timeout_s=30) == to
        assert reader.receiver.version == to
        assert reader.holds(trainer.states[to])
    reader.receiver.close()


def three_behind(trainer: Publisher, place: Place) -> tuple[Follower, list[PublishStats]]:
    """A reader of v1, and what was published since."""
    trainer.publish(1)
    reader = Follower(place)
    reader.receiver.fetch(timeout_s=10)
    stats = []
    for _ in range(3):
        change(trainer.model)
        stats.append(trainer.sender.publish())
    return reader, stats


def test_a_reader_that_is_ahead_of_nothing_fetches_the_chain_only() -> None:
    place = memory_place()
    trainer = Publisher(place)
    reader, stats = three_behind(trainer, place)
    reader.receiver.fetch(timeout_s=10)
    assert reader.receiver.progress.total_bytes == sum(one.delta_bytes for one in stats)
    assert reader.receiver.progress.fetched_bytes == reader.receiver.progress.total_bytes
    assert reader.holds(state_of(trainer.model))


def test_an_anchor_is_taken_where_the_chain_costs_more() -> None:
    place = memory_place()
    trainer = Publisher(place, anchor_every=4)
    trainer.publish(1)
    reader = Follower(place)
    reader.receiver.fetch(timeout_s=10)
    trainer.publish(9, step=lambda model: change(model, share=0.6))
    reader.receiver.fetch(timeout_s=10)
    assert reader.holds(trainer.states[10])
    whole = sum(p.nbytes for p in trainer.model.parameters())
    assert reader.receiver.progress.total_bytes < 5 * whole


def test_an_anchor_that_costs_more_than_the_deltas_is_passed_by() -> None:
    place = memory_place()
    trainer = Publisher(place, anchor_every=2)
    reader, stats = three_behind(trainer, place)
    assert any(one.anchor_bytes for one in stats)
    reader.receiver.fetch(timeout_s=10)
    assert reader.receiver.progress.total_bytes == sum(one.delta_bytes for one in stats)
    assert reader.holds(state_of(trainer.model))


def test_a_reader_begins_at_the_version_that_its_weights_have() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(4)
    reader = Follower(place)
    reader.model.load_state_dict(trainer.states[2])
    assert reader.receiver.fetch(timeout_s=10) == 4
    assert reader.holds(trainer.states[4])
    assert reader.receiver.progress.total_bytes < sum(p.nbytes for p in reader.model.parameters())


def test_a_reader_that_has_the_newest_version_fetches_nothing() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    reader = Follower(place)
    reader.model.load_state_dict(trainer.states[2])
    assert not reader.receiver.stage(timeout_s=10)
    assert reader.receiver.version == 2
    assert reader.receiver.progress.total_bytes == 0
    with pytest.raises(TransportTimeout, match="nothing newer than v2"):
        reader.receiver.stage(timeout_s=0.1)
    assert reader.receiver.fetch(timeout_s=0.1) == 2


def test_a_version_is_staged_while_the_old_one_serves() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    reader = Follower(place)
    reader.receiver.fetch(1, timeout_s=10)
    assert reader.receiver.stage(timeout_s=10)
    assert reader.holds(trainer.states[1])
    assert reader.receiver.commit() == 2
    assert reader.holds(trainer.states[2])


def test_half_written_weights_are_written_as_a_whole_whatever_their_digest() -> None:
    """What the engine derives from them may be of another version."""
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    engine = small_model(1)
    engine.load_state_dict(trainer.states[2])
    target = ModuleTarget(engine)
    with StoreReceiver(target, place.url, run=RUN, store=place.options, half_written=True) as found:
        assert found.is_dirty
        assert found.stage(timeout_s=10)
        assert found.commit() == 2
        assert not found.is_dirty
        assert found.progress.total_bytes > sum(p.nbytes for p in engine.parameters())


@pytest.mark.parametrize("start", [None, 1])
def test_what_is_too_large_to_stage_is_written_in_place(start: int | None) -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(3)
    reader = Follower(place, options=ReceiverOptions(max_staged_bytes=0))
    if start is not None:
        reader.receiver.fetch(start, timeout_s=10)
    before = state_of(reader.model)
    assert reader.receiver.stage(timeout_s=10)
    assert reader.holds(before)
    assert reader.receiver.commit() == 3
    assert reader.holds(trainer.states[3])
    assert not reader.receiver.is_dirty


def test_calls_in_the_wrong_order_are_refused() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(3)
    reader = Follower(place)
    with pytest.raises(CallOrderError, match="nothing is staged"):
        reader.receiver.commit()
    assert reader.receiver.stage(2, timeout_s=10)
    assert reader.receiver.stage(2, timeout_s=10)
    with pytest.raises(CallOrderError, match="another version is staged"):
        reader.receiver.stage(3, timeout_s=10)
    reader.receiver.discard()
    with pytest.raises(CallOrderError, match="nothing is staged"):
        reader.receiver.commit()
    assert reader.receiver.fetch(3, timeout_s=10) == 3
    with pytest.raises(CallOrderError, match="nothing is staged"):
        reader.receiver.commit()
    assert reader.holds(trainer.states[3])


def test_what_is_not_there_is_waited_for_and_then_reported() -> None:
    place = memory_place()
    reader = Follower(place)
    with pytest.raises(RunUnknown, match="no run"):
        reader.receiver.fetch(timeout_s=0.05)
    trainer = Publisher(place)
    trainer.publish(1)
    with pytest.raises(VersionMissing, match="no v7"):
        reader.receiver.fetch(7, timeout_s=0.05)
    later = threading.Timer(0.3, trainer.publish)
    later.start()
    assert reader.receiver.fetch(2, timeout_s=30) == 2
    later.join()
    assert reader.holds(trainer.states[2])


def test_storage_that_has_moved_is_not_written() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    reader = Follower(place)
    reader.receiver.fetch(1, timeout_s=10)
    reader.receiver.stage(timeout_s=10)
    with torch.no_grad():
        weight_of(reader).data = weight_of(reader).data.clone()
    with pytest.raises(TargetMoved):
        reader.receiver.commit()
    assert not reader.receiver.is_dirty
    assert reader.holds(trainer.states[1])
    assert reader.receiver.fetch(timeout_s=10) == 2
    assert reader.holds(trainer.states[2])


def test_weights_that_somebody_else_wrote_are_healed() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    reader = Follower(place, options=ReceiverOptions(scrub_every=1))
    reader.receiver.fetch(1, timeout_s=10)
    with torch.no_grad():
        weight_of(reader).zero_()
    with pytest.raises(DirtyReceiver, match="changed that no sync touched"):
        reader.receiver.fetch(timeout_s=10)
    with pytest.raises(DirtyReceiver):
        reader.receiver.check_serving()
    assert reader.receiver.fetch(timeout_s=10) == 2
    assert reader.holds(trainer.states[2])
    reader.receiver.check_serving()


def test_weights_that_were_reported_as_changed_are_measured_again() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    reader = Follower(place)
    reader.receiver.fetch(timeout_s=10)
    reader.model.load_state_dict(trainer.states[1])
    reader.receiver.invalidate()
    assert reader.receiver.version is None
    assert reader.receiver.fetch(timeout_s=10) == 2
    assert reader.holds(trainer.states[2])


def test_an_engine_that_sleeps_is_not_touched() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    reader = Follower(place)
    reader.receiver.fetch(1, timeout_s=10)
    reader.receiver.stage(timeout_s=10)
    reader.receiver.detach()
    with pytest.raises(CallOrderError):
        reader.receiver.commit()
    with pytest.raises(TransportTimeout, match="detached"):
        reader.receiver.stage(timeout_s=0.05)
    with torch.no_grad():
        weight_of(reader).zero_()
    reader.receiver.attach()
    assert reader.receiver.fetch(timeout_s=10) == 2
    assert reader.holds(trainer.states[2])


def test_a_closed_receiver_ends_its_wait() -> None:
    reader = Follower(memory_place())
    later = threading.Timer(0.2, reader.receiver.close)
    later.start()
    with pytest.raises(TransportClosed):
        reader.receiver.fetch(timeout_s=30)
    later.join()


def test_nothing_is_left_behind_but_what_was_not_written(tmp_path: Path) -> None:
    place = local_place(tmp_path / "store")
    trainer = Publisher(place)
    trainer.publish(2)
    spool = tmp_path / "spool"
    spool.mkdir()
    reader = Follower(place)
    with StoreReceiver(ModuleTarget(reader.model), place.url, spool=spool) as receiver:
        receiver.fetch(1, timeout_s=10)
        assert not list(spool.iterdir())
        receiver.stage(timeout_s=10)
        assert list(spool.iterdir())
    assert len(list(spool.iterdir())) == 1
    with StoreReceiver(ModuleTarget(reader.model), place.url, spool=spool) as receiver:
        receiver.fetch(timeout_s=10)
    assert not list(spool.iterdir())


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    place = memory_place()
    Publisher(place).publish(1)
    model = Follower(place).model
    receiver = StoreReceiver(ModuleTarget(model), place.url, spool=tmp_path / "none")
    with pytest.raises(ConfigError, match="none"):
        receiver.fetch(timeout_s=10)


def test_an_engine_follows_and_commits_in_its_own_pauses() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(1)
    reader = Follower(place)
    with reader.receiver.follow() as follower:
        for version in (1, 2, 3):
            assert follower.wait_staged(timeout_s=30)
            assert follower.commit() == version
            assert reader.holds(trainer.states[version])
            trainer.publish()
    assert isinstance(follower, StagingThread)


def test_a_follower_commits_in_the_pauses_that_it_is_given() -> None:
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(1)
    reader = Follower(place)
    pauses = []

    @contextmanager
    def pause() -> Iterator[None]:
        pauses.append(reader.receiver.version)
        yield

    with reader.receiver.follow(pause=pause):
        wait_until(lambda: reader.receiver.version == 1)
        trainer.publish(3)
        wait_until(lambda: reader.receiver.version == 4)
    assert pauses[0] is None
    assert reader.holds(trainer.states[4])


def test_a_follower_that_starts_before_the_run_waits_for_it() -> None:
    place = memory_place()
    reader = Follower(place)
    with reader.receiver.follow() as follower:
        assert not follower.wait_staged(timeout_s=0.3)
        trainer = Publisher(place)
        trainer.publish(1)
        assert follower.wait_staged(timeout_s=30)
        assert follower.commit() == 1
    assert reader.holds(trainer.states[1])


POSSIBLE = [
    "none",
    "zstd",
    *(name.name.lower() for name in ROW_CODECS if name is not IndexCodec.RAW),
]


@pytest.mark.parametrize("compression", POSSIBLE)
def test_deltas_of_every_codec_are_folded_and_read(compression: str) -> None:
    place = memory_place()
    trainer = Publisher(place, anchor_every=4, compression=compression)
    trainer.publish(7)
    for start, to in ((None, 3), (2, 3), (1, 4), (5, 7), (None, 7), (3, 3)):
        reader = Follower(place)
        if start is not None:
            reader.model.load_state_dict(trainer.states[start])
        assert reader.receiver.fetch(to, timeout_s=30) == to
        assert reader.holds(trainer.states[to])


def test_what_was_fetched_is_sent_onward_to_engines() -> None:
    """As a process beside an engine does whose workers follow a sender."""
    place = memory_place()
    trainer = Publisher(place)
    trainer.publish(2)
    held, engine = CopiedTarget(), small_model(7)
    store = StoreReceiver(held, place.url, store=place.options)
    store.fetch(1, timeout_s=10)
    link = inprocess.Sender()
    with WeightSender(CopiedSource(held), link) as sender:
        receiver = WeightReceiver(ModuleTarget(engine), link.receiver())
        with StagingThread(receiver) as staging:
            for version in (1, 2):
                if version > 1:
                    assert store.fetch(version, timeout_s=10) == version
                done = threading.Thread(target=sender.send_weights)
                sender.wait_for_receivers(1, timeout_s=30)
                done.start()
                assert staging.wait_staged(timeout_s=30)
                staging.commit()
                done.join()
                state = trainer.states[version]
                assert all(same_bits(engine.state_dict()[name], state[name]) for name in state)
