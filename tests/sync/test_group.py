"""Syncs of trainers whose ranks each hold a part: what they send, and what becomes of failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltasync import SenderOptions, SyncStats
from deltasync.delta.shard import ShardSpec, placed
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import (
    ConfigError,
    MalformedMessage,
    PeerLost,
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from deltasync.sync.group import orders
from deltasync.sync.group.rank import TrainerRank
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.transports.base import Frame, ReceiveTransport, SendTransport
from deltasync.wire.frame import encode
from tests.delta.shards import placements
from tests.worlds.links import (
    Model,
    ThroughReceiver,
    ThroughSender,
    Wrap,
    bits_equal,
    random_model,
    step,
    until,
)
from tests.worlds.toy_engines import CHECKPOINT, SHAPES, rank_of
from tests.worlds.trainers import Boxes, Split, rows_of, trainer_of

SMALL = SenderOptions(bucket_bytes=400, compression="zstd")
CODED = SMALL.model_copy(update={"compression": "gap"})


def model(seed: int) -> Model:
    return random_model(SHAPES, seed).bfloat16()


def change(here: Split, seed: int, share: float = 0.1) -> None:
    step(here.module, torch.Generator().manual_seed(seed), share)
    here.step()


class Flaky(ThroughSender):
    """A rank's link that fails when so many frames more have been sent."""

    left: int | None = None

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        if self.left == 0:
            self.left = None
            raise RuntimeError("planted")
        self.left = None if self.left is None else self.left - 1
        super().send(frame, timeout_s=timeout_s)


class Torn(ThroughReceiver):
    """A receiver's link that is lost when so many frames more have come."""

    left: int | None = None

    def receive(self, *, timeout_s: float) -> Frame:
        frame = super().receive(timeout_s=timeout_s)
        if self.left == 0:
            self.left = None
            self.disconnect()
            raise PeerLost("planted")
        self.left = None if self.left is None else self.left - 1
        return frame


def torn_into(ends: list[Torn]) -> Wrap:
    """A wrap that keeps the ends it makes."""

    def tear(link: ReceiveTransport) -> ReceiveTransport:
        ends.append(Torn(link))
        return ends[-1]

    return tear


@pytest.mark.parametrize("world", [1, 3])
def test_each_rank_sends_its_rows(world: int) -> None:
    shapes = SHAPES | {"scale": (), "shift": ()}
    source, target = random_model(shapes, 1), random_model(shapes, 2)
    with trainer_of(source, rows_of(source, world)) as here:
        here.add(target)
        here.wait(1)
        assert here.send().full_synced == 1
        assert bits_equal(source, target)
        for seed in range(3):
            change(here, seed, share=0.9)
            stats = here.send()
            assert (stats.kind, stats.version) == ("delta", seed + 2)
            assert 0 < stats.changed <= len(shapes)
            assert bits_equal(source, target)
        stats = here.send()
        assert (stats.nnz, stats.num_buckets) == (0, 0)
        assert here.hub.exchanged_bytes < 4096


STEPS = st.sampled_from(["step", "nothing", "rank", "lane", "receiver", "order"])


def lost_at(here: Split, when: int) -> Callable[[orders.Said], None]:
    """For a hub: rank 1, if there is one, is gone when it is told this order of a call."""
    told: list[orders.Said] = []

    def strike(order: orders.Said) -> None:
        told.append(order)
        if len(told) == 1 + when and 1 in here.calls._peers:
            here.hub.drop(here.calls._peers[1])

    return strike


@settings(max_examples=10, deadline=None)
@given(
    boxes=placements(SHAPES),
    history=st.lists(
        st.tuples(STEPS, st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=4
    ),
    options=st.sampled_from([SMALL, CODED, SenderOptions()]),
)
@example(rows_of(model(1), 3), [("order", when, 0) for when in range(3)], SMALL)
def test_any_history_of_steps_and_failures_ends_bit_equal(
    boxes: list[Boxes], history: list[tuple[str, int, int]], options: SenderOptions
) -> None:
    source = model(1)
    links: list[Flaky] = []
    torn: list[Torn] = []

    def wrap(rank: int, link: SendTransport) -> SendTransport:
        links.append(Flaky(link))
        return links[-1]

    whole, parts = model(2), [rank_of(model(3), rank) for rank in range(2)]
    with trainer_of(source, boxes, options=options, wrap=wrap) as here:
        here.add(whole, engine="whole", wrap=torn_into(torn))
        for rank, part in enumerate(parts):
            here.add(RoutedTarget(part, CHECKPOINT), engine="parts", rank=rank, world=2)
        here.settle(3)
        for seed, (what, when, nth) in enumerate(history):
            if what != "nothing":
                change(here, seed, share=0.2)
            which = nth % len(boxes)
            match what:
                case "rank":
                    here.sources[which].fails = RuntimeError("planted")
                case "lane":
                    links[which].left = when
                case "receiver":
                    torn[which].left = when
                case "order":
                    here.hub.before = lost_at(here, when)
            here.outcomes(timeout_s=2.0)
            here.hub.before = lambda order: None
            here.sources[which].fails = links[which].left = torn[which].left = None
        change(here, 99)
        here.settle(3)
        assert bits_equal(source, whole)
        for rank, part in enumerate(parts):
            assert bits_equal(part, rank_of(source, rank))
        assert here.send().nnz == 0
        assert here.hub.exchanged_bytes < 4096 * len(boxes)


def joined(here: Split, target: Model, count: int = 1) -> None:
    serving = here.add(target)
    here.wait(count)
    here.send()
    until(lambda: serving.receiver.version == here.sender.version)  # it may join by digest alone


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "If a trainer rank fails or is late, the version is aborted on all ranks; receivers keep "
    "the old one.",
)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("planted in a file of \udcff.bin"),
        KeyError("planted"),
    ],
    ids=["error", "bug"],
)
def test_one_rank_that_fails_aborts_the_version_everywhere(error: Exception) -> None:
    """The rank has lost its snapshot after the second error: it starts over with all."""
    source, target, is_lost = model(1), model(1), isinstance(error, KeyError)
    with trainer_of(source, rows_of(source, 3)) as here:
        joined(here, target)
        for failing in (1,) if is_lost else range(3):
            before = here.sender.version
            change(here, failing)
            here.sources[failing].fails = error
            calls = here.sending()
            found = [future.exception() or future.result() for future in calls]
            here.sources[failing].fails = None
            for rank, outcome in enumerate(found):
                assert isinstance(outcome, type(error) if rank == failing else SyncAborted)
                assert "planted" in str(outcome)
            assert here.sender.version == before == here.serving["engine/0"].receiver.version
            assert not bits_equal(source, target)
            if is_lost:
                here.settle(1)
                change(here, 5)
                before = here.sender.version
            stats = here.send()
            assert (stats.kind, stats.base_version, stats.lost) == ("delta", before, {})
            assert bits_equal(source, target)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "If a trainer rank fails or is late, the version is aborted on all ranks; receivers keep "
    "the old one.",
)
def test_a_rank_that_is_late_costs_a_version_and_no_full_sync() -> None:
    source, target = model(1), model(1)
    with trainer_of(source, rows_of(source, 3)) as here:
        joined(here, target)
        change(here, 1)
        late = here.ranks.pop(1)
        for outcome in here.outcomes(timeout_s=1.0):
            assert isinstance(outcome, SyncAborted)
            assert "rank 1" in str(outcome)
        here.ranks.insert(1, late)
        with pytest.raises(SyncAborted, match=r"given this sync up|is gone"):
            late.send_weights(timeout_s=60)
        change(here, 2)
        assert here.send().full_synced == 0
        assert bits_equal(source, target)


@pytest.mark.promise(
    "Time",
    "A trainer rank abandons a call if rank 0 sends no order for ten timeouts.",
)
def test_ranks_wait_for_the_next_order_however_long_the_call_takes_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deltasync.sync.group.rank._PATIENCE", 1)
    source, target = model(1), model(2)
    with trainer_of(source, rows_of(source, 2)) as here:
        here.add(target)
        here.wait(1)
        here.hub.before = lambda order: time.sleep(0.8)
        began = time.monotonic()
        assert here.send(timeout_s=3.0).full_synced == 1
        assert time.monotonic() - began > 3.0
        silence = threading.Event()
        here.hub.before = lambda order: silence.wait(60)
        first, second = here.sending(timeout_s=0.5)
        found = second.result(60)
        assert isinstance(found, SyncAborted)
        assert "says nothing" in str(found)
        silence.set()
        first.result(60)
        here.hub.before = lambda order: None
        change(here, 1)
        here.settle(1)
        assert bits_equal(source, target)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "What several ranks hold alike is sent once.",
)
def test_replicas_send_once_and_about_as_much() -> None:
    shapes = {"big": (64, 8192), "odd": (3, 5), "norm": (512,)}
    source, target = random_model(shapes, 1), random_model(shapes, 2)
    wholes = {name: ShardSpec.whole(shape) for name, shape in shapes.items()}
    links: list[Counted] = []

    class Counted(ThroughSender):
        num_bytes = 0

        def send(self, frame: Frame, *, timeout_s: float) -> None:
            self.num_bytes += 0 if frame.payload is None else len(frame.payload)
            super().send(frame, timeout_s=timeout_s)

    def wrap(rank: int, link: SendTransport) -> SendTransport:
        links.append(Counted(link))
        return links[-1]

    with trainer_of(source, [wholes] * 4, wrap=wrap) as here:
        joined(here, target)
        total = sum(tensor.numel() * 4 for tensor in source.parameters())
        sent = [link.num_bytes for link in links]
        assert total <= sum(sent) < 1.02 * total
        assert max(sent) < 1.2 * min(sent)
        assert bits_equal(source, target)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A receiver needs a lane to each rank.",
)
def test_receivers_need_a_lane_to_each_rank() -> None:
    source = model(1)
    with trainer_of(source, rows_of(source, 3)) as here:
        here.links.pop()
        serving = here.add(model(1))
        give_up = time.monotonic() + 60
        while not serving.errors and time.monotonic() < give_up:
            with pytest.raises(TransportTimeout):
                here.sender.wait_for_receivers(1, timeout_s=0.1)
        assert any("1 lanes, this trainer sends on 2" in str(error) for error in serving.errors)


def test_an_engine_that_sat_a_sync_out_is_told_again_what_each_rank_sends() -> None:
    source, target = model(1), model(1)
    with trainer_of(source, rows_of(source, 2)) as here:
        receiver = here.add(target).receiver
        here.wait(1)
        assert here.send().full_synced == 0
        until(lambda: receiver.state is ReceiverState.READY)
        receiver.detach()
        change(here, 1)
        assert [type(error) for error in here.outcomes()] == [ConfigError, SyncAborted]
        receiver.attach()
        assert (here.send().kind, bits_equal(source, target)) == ("delta", True)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "A trainer rank that is lost after the decision takes no version from engines.",
)
def test_a_rank_that_is_lost_after_the_decision_takes_no_version_from_engines() -> None:
    source, target = model(1), model(1)
    with trainer_of(source, rows_of(source, 3)) as here:
        joined(here, target)
        before, lost = here.sender.version, here.ranks[1]
        assert isinstance(lost, TrainerRank)

        def strike(order: orders.Said) -> None:
            if isinstance(order, orders.Done):
                lost._link.disconnect()

        here.hub.before = strike
        change(here, 1)
        found = here.outcomes(timeout_s=1.0)
        assert isinstance(found[0], SyncStats)
        assert isinstance(found[1], SyncAborted)
        assert here.serving["engine/0"].receiver.version == here.sender.version == before + 1
        assert bits_equal(source, target)
        here.hub.before = lambda order: None
        here.settle(1)
        change(here, 2)
        assert here.send().full_synced == 0
        assert bits_equal(source, target)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest memory behind any tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                Largest.num_bytes = max(Largest.num_bytes, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.promise("Cost", "No rank of a sharded trainer creates a full-size tensor.")
def test_no_rank_makes_a_tensor_of_full_size() -> None:
    shapes = {"big": (2048, 1024), "other": (1024, 1024)}
    source, target = random_model(shapes, 1), random_model(shapes, 2)
    boxes = [
        {name: placed(shape, (4,), (rank,), [(1, 1)]) for name, shape in shapes.items()}
        for rank in range(4)
    ]
    options = SenderOptions(bucket_bytes=1 << 17)
    Largest.num_bytes = 0
    with trainer_of(source, boxes, options=options) as here:
        here.around = Largest
        joined(here, target)
        for share in (0.01, 0.9):
            change(here, 1, share)
            here.send()
            assert bits_equal(source, target)
    held = sum(tensor.numel() * 4 for tensor in source.parameters()) // 4
    assert 0 < Largest.num_bytes <= 1.01 * held


def test_a_rank_that_miscounts_parameters_fails_the_call_before_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = model(1), model(1)
    with trainer_of(source, rows_of(source, 2)) as here:
        joined(here, target)
        change(here, 1)
        before, collect = here.sender.version, here.hub.collect_replies

        def miscounted(*, timeout_s: float) -> dict[int, bytes | TransportError]:
            return {peer: one_more(said) for peer, said in collect(timeout_s=timeout_s).items()}

        with monkeypatch.context() as hub:
            hub.setattr(here.hub, "collect_replies", miscounted)
            outcome = here.outcomes()[0]
        assert isinstance(outcome, MalformedMessage)
        assert here.sender.version == before
        assert here.send().version == before + 1
        assert bits_equal(source, target)


def one_more(said: bytes | TransportError) -> bytes | TransportError:
    """The same answer, of one parameter more if it says which have changed."""
    found = orders.decode(said) if isinstance(said, bytes) else None
    if not isinstance(found, orders.Found) or not found.changed:
        return said
    return encode(found.model_copy(update={"changed": (*found.changed, (1, 0))}))
