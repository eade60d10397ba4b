"""What a sync promises: joins, losses, whole engines, memory bounds, planted faults."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import (
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    NoReceivers,
    SyncAborted,
    TransportTimeout,
)
from deltasync.transports.base import Frame, SendTransport
from deltasync.wire.messages import Failed, Message, Prepared
from tests.worlds.links import (
    Model,
    Serving,
    Stubborn,
    ThroughSender,
    bits_equal,
    fleet,
    random_model,
    until,
)
from tests.worlds.peers import Liar, with_

BF16 = torch.bfloat16


def model(seed: int = 0, dtype: torch.dtype = BF16) -> Model:
    shapes = {"embed": (50, 16), "layer": (16, 16), "norm": (16,)}
    return random_model(shapes, seed).to(dtype)


def nudge(source: nn.Module, count: int = 3) -> None:
    """Change `count` elements of the first parameter by a bit."""
    bits = as_bits(next(source.parameters()).data).view(-1)
    bits[torch.randperm(len(bits))[:count]] ^= 1


def halves_of(whole: Model) -> list[Model]:
    """Pipeline ranks, with some of a model's parameters each."""
    parts = ("embed", "norm"), ("layer", "norm")
    return [Model({n: whole.get_parameter(n).data.clone() for n in names}) for names in parts]


def hold_the_same(source: nn.Module, parts: Iterable[nn.Module]) -> bool:
    return all(
        torch.equal(as_bits(parameter), as_bits(source.get_parameter(name)))
        for part in parts
        for name, parameter in part.named_parameters()
    )


@pytest.mark.promise(
    "All or nothing",
    "A lost receiver or a restarted trainer rejoins by digest if the weights match, otherwise "
    "by a full sync.",
)
def test_members_get_what_changed_and_newcomers_what_they_lack() -> None:
    source, same, late = model(), model(), model(2)
    with fleet(source) as here:
        first = here.join({"same": same})
        assert (first.kind, first.payload_bytes, first.nnz) == ("full", 0, 0)
        assert (first.joined, first.full_synced, first.receivers) == (1, 0, 1)
        nudge(source)
        second = here.join({"late": late})
        assert (second.kind, second.joined, second.full_synced) == ("delta", 1, 1)
        assert (second.receivers, second.version) == (2, first.version + 1)
        assert 0 < second.payload_bytes < second.joined_bytes / 4
        nudge(source)
        delta = here.sender.send_weights()
        assert (delta.nnz, delta.base_version, delta.receivers) == (3, second.version, 2)
        assert delta.changed == 1
        assert bits_equal(source, same)
        assert bits_equal(source, late)
        nothing = here.sender.send_weights()
        assert (nothing.version, nothing.nnz, nothing.payload_bytes) == (4, 0, 0)
        until(lambda: all(one.receiver.version == 4 for one in here.serving.values()))
    with fleet(source) as again:
        stats = again.join({"same": same, "late": late})
        assert (stats.payload_bytes, stats.receivers, stats.full_synced) == (0, 2, 0)
        assert again.sender.stream_id != here.sender.stream_id


@pytest.mark.promise("All or nothing", "A failed sync loses nothing: the next one covers both.")
@pytest.mark.promise("Errors", "`NoReceivers`: no receiver is connected.")
def test_the_others_go_on_when_one_is_lost_and_losing_all_loses_nothing() -> None:
    source, stays, leaves = model(), model(), model()
    with fleet(source) as here:
        with pytest.raises(NoReceivers):
            here.sender.send_weights()
        with pytest.raises(TransportTimeout):
            here.sender.wait_for_receivers(1, timeout_s=0.05)
        here.join({"stays": stays, "leaves": leaves})
        here.serving.pop("leaves/0").stop()
        nudge(source)
        stats = here.sender.send_weights(timeout_s=60)
        assert (stats.kind, stats.receivers) == ("delta", 1)
        assert list(stats.lost) == ["leaves[0/1]"]
        assert bits_equal(source, stays)
        here.serving.pop("stays/0").stop()
        nudge(source)
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=60)
        nudge(source)
        assert here.join({"stays": stays}).version == stats.version + 1
        assert bits_equal(source, stays)


def test_a_full_sync_after_a_delta_that_nobody_has_written_counts_alone() -> None:
    source = model()
    stubborn = Stubborn(model())
    with fleet(source) as here:
        here.join({"stubborn": stubborn})
        nudge(source)
        same = copy.deepcopy(source)
        here.add(same, engine="same")
        here.wait(2)
        stubborn.fails = True
        stats = here.sender.send_weights(timeout_s=60)
        assert (stats.kind, stats.version, stats.engines) == ("full", 3, ("same",))
        assert (stats.payload_bytes, stats.num_buckets, stats.bytes_by_codec) == (0, 0, {})
        assert (stats.transfer_s, stats.commit_s, stats.receiver_commit_s) == (0, 0, 0)


def test_the_commits_of_members_are_not_those_of_receivers_that_join_them() -> None:
    """What one of them takes is a part of what all take."""
    source = model()
    with fleet(source) as here:
        here.join({"member": model()})
        nudge(source)
        stats = here.join(
            {"late": model(2)}, wrap=partial(Liar, kind="committed", tamper=with_(commit_s=3600.0))
        )
        assert (stats.kind, stats.joined, stats.full_synced) == ("delta", 1, 1)
        assert 0 < stats.receiver_commit_s <= stats.commit_s


def test_what_was_sent_in_vain_to_who_joins_is_counted() -> None:
    """Who cannot join costs a full sync in each call, and operators see that."""
    source = model()
    with fleet(source) as here:
        here.join({"member": model()})
        nudge(source)

        def fail(prepared: Prepared) -> list[Message | bytes]:
            return [Failed(version=prepared.version, error="E", reason="planted")]

        stats = here.join({"late": model(2)}, wrap=partial(Liar, kind="prepared", tamper=fail))
        assert (stats.kind, stats.joined, list(stats.lost)) == ("delta", 0, ["late[0/1]"])
        assert stats.joined_bytes >= stats.dense_bytes


class WaitsForOne(ThroughSender):
    """A link on which payloads reach all or none: it gives peer 1 up at the next one, late."""

    is_waiting = False

    def __init__(self, inner: SendTransport) -> None:
        super().__init__(inner)
        self.outlives_losses = False

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        if self.is_waiting and frame.payload is not None:
            self.is_waiting = False
            time.sleep(2.2)
            self.drop(1)
            raise TransportTimeout("peer 1 was not ready in time")
        super().send(frame, timeout_s=timeout_s)


def test_a_receiver_waits_for_the_second_try_however_long_the_first_took() -> None:
    source, replica = model(), model(1)
    with fleet(source, wrap=WaitsForOne) as here, ThreadPoolExecutor(2) as pool:
        joined = list[Future[int]]()
        stays, absent = (
            WeightReceiver(ModuleTarget(target), here.transport.receiver(), engine=name)
            for name, target in {"stays": replica, "absent": model(2)}.items()
        )
        for one in (stays, absent):
            joined.append(pool.submit(one.receive_weights, timeout_s=60))
            here.wait(len(joined))
        here.sender.send_weights(timeout_s=60)
        assert [one.result(60) for one in joined] == [1, 1]
        nudge(source)
        here.link.is_waiting = True
        received = pool.submit(stays.receive_weights, timeout_s=2)
        stats = here.sender.send_weights(timeout_s=60)
        assert (stats.receivers, list(stats.lost), stats.attempts) == (1, ["absent[0/1]"], 2)
        assert received.result(60) == stats.version
        assert bits_equal(source, replica)


def test_an_engine_of_two_ranks_is_a_member_as_a_whole_or_not_at_all() -> None:
    source, halves = model(), halves_of(model(3))
    with fleet(source) as here:
        here.add(halves[0], rank=0, world=2)
        here.wait(1)
        with pytest.raises(NoReceivers):
            here.sender.send_weights()
        here.add(halves[1], rank=1, world=2)
        here.wait(2)
        here.sender.send_weights()
        nudge(source)
        stats = here.sender.send_weights()
        assert stats.receivers == 2
        assert hold_the_same(source, halves)
        here.serving.pop("engine/1").stop()
        with pytest.raises(SyncAborted, match=r"engine\[0/2\].*engine\[1/2\]"):
            here.sender.send_weights()
        assert here.sender.num_receivers == 0
        here.add(halves[1], rank=1, world=2)
        here.wait(2)
        nudge(source)
        assert here.sender.send_weights().version == stats.version + 1
        assert hold_the_same(source, halves)


@pytest.mark.promise(
    "All or nothing",
    "If one rank of an engine cannot commit, its other ranks put the old version back; other "
    "engines keep the new one.",
)
@pytest.mark.promise(
    "Errors",
    "`SyncAborted`, `SyncStats.lost`: the trainer learns why a receiver failed, within a sync "
    "and between syncs.",
)
def test_one_rank_that_cannot_commit_undoes_its_whole_engine_and_no_other() -> None:
    source, single = model(), model()
    halves = halves_of(source)
    stubborn = Stubborn(halves[1])
    with fleet(source) as here:
        first = here.add(halves[0], rank=0, world=2)
        here.add(stubborn, rank=1, world=2)
        here.join({"single": single})
        until(lambda: first.receiver.version == 1)
        before = [p.clone() for p in halves[0].parameters()]
        with first.receiver.hold() as held:
            digests = held.live.ledger.by_share().tolist()
        nudge(source)
        stubborn.fails = True
        stats = here.sender.send_weights(timeout_s=60)
        assert (stats.receivers, set(stats.lost)) == (1, {"engine[1/2]"})
        assert "TargetMoved" in stats.lost["engine[1/2]"]
        assert bits_equal(source, single)
        until(lambda: bool(first.errors))
        assert isinstance(first.errors[0], SyncAborted)
        assert all(map(torch.equal, before, halves[0].parameters()))
        with first.receiver.hold() as held:
            assert held.live.ledger.by_share().tolist() == digests
        assert not first.receiver.is_dirty
        here.wait(3)
        assert here.sender.send_weights(timeout_s=60).receivers == 3
        assert hold_the_same(source, halves)


def test_a_rank_that_was_dirty_is_dirty_after_a_sync_that_is_undone() -> None:
    source, halves = model(), halves_of(model(1))
    stubborn = Stubborn(halves[1])
    with fleet(source) as here:
        here.add(stubborn, rank=1, world=2)
        place: Any = {"rank": 0, "world": 2, "half_written": True}
        receiver = WeightReceiver(ModuleTarget(halves[0]), here.transport.receiver(), **place)
        serving = here.serving["engine/0"] = Serving(receiver).start()
        here.wait(2)
        stubborn.fails = True
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=60)
        until(lambda: any(isinstance(error, SyncAborted) for error in serving.errors))
        assert receiver.is_dirty
        here.wait(2)
        assert here.sender.send_weights(timeout_s=60).full_synced == 2
        until(lambda: not receiver.is_dirty)
        assert hold_the_same(source, halves)


@pytest.mark.promise("Checks", "Replaced storage is detected before what is staged is written.")
def test_replaced_target_storage_is_noticed_before_a_decision_and_bound_anew() -> None:
    source, replica = model(), model(1)
    with fleet(source) as here:
        here.join(replica)
        parameter = replica.get_parameter("layer")
        parameter.data = parameter.data.clone()
        before = as_bits(parameter).clone()
        nudge(source)
        with pytest.raises(SyncAborted, match="TargetMoved"):
            here.sender.send_weights()
        assert torch.equal(as_bits(parameter), before)
        here.wait(1)
        assert here.sender.send_weights().receivers == 1
        assert bits_equal(source, replica)
        assert not here.serving["engine/0"].receiver.is_dirty


@pytest.mark.promise("Checks", "A delta on wrong weights is refused before it is written.")
@pytest.mark.parametrize("max_staged_bytes", [0, None])
def test_wrong_weights_under_a_delta_are_caught_before_any_write(
    max_staged_bytes: int | None,
) -> None:
    """A delta on a wrong base: the predicted digest differs, so no version is decided."""
    source, replica = model(), model()
    options = ReceiverOptions(scrub_every=0, max_staged_bytes=max_staged_bytes)
    with fleet(source) as here:
        version = here.join(replica, options=options).version
        swap = replica.get_parameter("embed").data.view(-1)
        swap[[0, 1]] = swap[[1, 0]]
        as_bits(source.get_parameter("embed").data).view(-1)[0] ^= 1
        with pytest.raises(SyncAborted, match="DigestMismatch"):
            here.sender.send_weights(timeout_s=60)
        assert here.sender.version == version
        here.wait(1)
        assert here.sender.send_weights(timeout_s=60).full_synced == 1
        assert bits_equal(source, replica)


@pytest.mark.promise(
    "Cost",
    "Memory beyond weights and snapshot stays within the bounds of the options.",
)
def test_memory_is_bounded_on_both_sides() -> None:
    source, replica = (random_model({"w": (40, 4096)}, 0) for _ in range(2))
    options = SenderOptions(max_inflight_bytes=60_000, bucket_bytes=40_000)
    with fleet(source, options=options) as here:
        here.join(replica, options=ReceiverOptions(max_staged_bytes=1000))
        as_bits(source.get_parameter("w").data)[:, ::3] ^= 1
        stats = here.sender.send_weights()
        assert stats.sender_bytes <= 60_000 + 2 * 40_000
        assert stats.receiver_bytes <= 1000
        assert stats.num_buckets > 3
        assert bits_equal(source, replica)


@pytest.mark.promise("Cost", "What is sent and staged grows with what changed, not with the model.")
def test_what_is_sent_and_staged_does_not_grow_with_the_model() -> None:
    """A change that is alone in its tile takes a place, a value and an entry for the tile."""
    took = []
    for numel in (1 << 15, 1 << 20):
        source, replica = random_model({"w": (numel,)}, 0), random_model({"w": (numel,)}, 0)
        with fleet(source) as here:
            here.join(replica)
            as_bits(source.get_parameter("w").data)[:: numel // 500] ^= 1
            took.append(here.sender.send_weights())
            assert bits_equal(source, replica)
    small, large = took
    assert small.nnz == pytest.approx(large.nnz, rel=0.1)
    assert large.payload_bytes < 2 * small.payload_bytes
    assert large.receiver_bytes < 2 * small.receiver_bytes
