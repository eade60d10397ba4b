"""What a sync promises: joins, losses, whole engines, memory bounds, planted faults."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    NamedTensor,
    Policy,
    ReceiverOptions,
    SenderOptions,
    SyncStats,
    TrainerGroup,
    TrainerRank,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    ConfigError,
    DirtyReceiver,
    LayoutMismatch,
    NoReceivers,
    Refused,
    SourceChanged,
    SyncAborted,
    TargetMoved,
    TransportClosed,
    TransportTimeout,
)
from deltasync.sync.protocol.receiver_session import ReceiverState
from deltasync.transports import inprocess
from deltasync.transports.base import Capabilities, Frame, ReceiveTransport
from deltasync.wire.frame import decode
from tests.worlds.links import (
    Fleet,
    Model,
    Serving,
    Stubborn,
    ThroughReceiver,
    ThroughSender,
    bits_equal,
    fleet,
    random_model,
)


def model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model(
        {
            "embed": torch.randn(50, 16, generator=generator).to(dtype),
            "layer": torch.randn(16, 16, generator=generator).to(dtype),
            "norm": torch.randn(16, generator=generator).to(dtype),
        }
    )


def nudge(source: nn.Module, count: int = 3) -> None:
    """Change `count` elements of the first parameter by a bit."""
    bits = as_bits(next(source.parameters()).data).view(-1)
    bits[torch.randperm(len(bits))[:count]] ^= 1


def test_equal_weights_join_without_a_byte() -> None:
    source = model()
    with fleet(source) as here:
        here.add(model())
        here.wait(1)
        stats = here.sender.send_weights()
        assert (stats.kind, stats.payload_bytes, stats.full_synced) == ("full", 0, 0)
        assert (stats.joined, stats.receivers, stats.nnz) == (1, 1, 0)


def test_different_weights_join_by_a_full_sync_then_get_deltas() -> None:
    source, replica = model(), model(1)
    with fleet(source) as here:
        here.add(replica)
        here.wait(1)
        full = here.sender.send_weights()
        assert (full.kind, full.full_synced, full.nnz) == ("full", 1, full.numel)
        nudge(source)
        delta = here.sender.send_weights()
        assert (delta.kind, delta.nnz, delta.base_version) == ("delta", 3, full.version)
        assert delta.parameters == {"changed": 1, "unchanged": 0, "frozen": 2}
        assert delta.payload_bytes < full.payload_bytes / 4
        assert bits_equal(source, replica)


def test_nothing_changed_is_a_version_without_payload() -> None:
    with fleet(model()) as here:
        here.add(model())
        here.wait(1)
        first = here.sender.send_weights()
        second = here.sender.send_weights()
        assert (second.version, second.nnz, second.payload_bytes) == (first.version + 1, 0, 0)


def test_what_was_sent_is_not_sent_again() -> None:
    source = model()
    with fleet(source) as here:
        here.add(model())
        here.wait(1)
        here.sender.send_weights()
        nudge(source)
        assert here.sender.send_weights().payload_bytes > 0
        assert here.sender.send_weights().payload_bytes == 0


@pytest.mark.promise(
    "All or nothing",
    "A lost receiver or a restarted trainer rejoins by digest if the weights match, otherwise "
    "by a full sync.",
)
def test_a_late_joiner_alone_gets_a_full_sync() -> None:
    source, early, late = model(), model(), model(2)
    with fleet(source) as here:
        here.add(early, engine="early")
        here.wait(1)
        here.sender.send_weights()
        here.add(late, engine="late")
        here.wait(2)
        nudge(source)
        stats = here.sender.send_weights()
        assert (stats.kind, stats.joined, stats.full_synced, stats.receivers) == ("delta", 1, 1, 2)
        assert stats.payload_bytes < stats.joined_bytes
        assert bits_equal(source, early)
        assert bits_equal(source, late)
        nudge(source)
        assert here.sender.send_weights().receivers == 2
        assert bits_equal(source, late)


def test_the_others_go_on_when_one_is_lost() -> None:
    source, stays, leaves = model(), model(), model()
    with fleet(source) as here:
        here.add(stays, engine="stays")
        here.add(leaves, engine="leaves")
        here.wait(2)
        here.sender.send_weights()
        here.serving.pop("leaves/0").stop()
        nudge(source)
        stats = here.sender.send_weights(timeout_s=5)
        assert (stats.kind, stats.receivers) == ("delta", 1)
        assert list(stats.lost) == ["leaves[0/1]"]
        assert bits_equal(source, stays)


class WaitsForOne(ThroughSender):
    """A link on which payloads reach all or none: it gives peer 1 up at the next one, late."""

    is_waiting = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, outlives_losses=False)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        if self.is_waiting and frame.payload is not None:
            self.is_waiting = False
            time.sleep(3.5)
            self.drop(1)
            raise TransportTimeout("peer 1 was not ready in time")
        super().send(frame, timeout_s=timeout_s)


def test_a_receiver_waits_for_the_second_try_however_long_the_first_took() -> None:
    source, replica = model(), model(1)
    with closing(inprocess.Sender()) as inner, ThreadPoolExecutor(2) as pool:
        link = WaitsForOne(inner)
        sender, joined = WeightSender(ModuleSource(source), link), list[Future[int]]()
        stays, absent = (
            WeightReceiver(ModuleTarget(target), inner.receiver(), engine=name)
            for name, target in {"stays": replica, "absent": model(2)}.items()
        )
        for one in (stays, absent):
            joined.append(pool.submit(one.receive_weights, timeout_s=20))
            sender.wait_for_receivers(len(joined), timeout_s=20)
        sender.send_weights(timeout_s=20)
        assert [one.result(20) for one in joined] == [1, 1]
        nudge(source)
        link.is_waiting = True
        received = pool.submit(stays.receive_weights, timeout_s=3)
        stats = sender.send_weights(timeout_s=20)
        assert (stats.receivers, list(stats.lost), stats.attempts) == (1, ["absent[0/1]"], 2)
        assert received.result(20) == stats.version
        assert bits_equal(source, replica)


@pytest.mark.promise("Errors", "`NoReceivers`: no receiver is connected.")
def test_nobody_to_send_to_is_said() -> None:
    with fleet(model()) as here, pytest.raises(NoReceivers):
        here.sender.send_weights()
    with fleet(model()) as here, pytest.raises(TransportTimeout):
        here.sender.wait_for_receivers(1, timeout_s=0.05)


@pytest.mark.promise("All or nothing", "A failed sync loses nothing: the next one covers both.")
def test_losing_everybody_aborts_and_loses_nothing() -> None:
    source, replica = model(), model()
    with fleet(source) as here:
        here.add(replica)
        here.wait(1)
        version = here.sender.send_weights().version
        here.serving.pop("engine/0").stop()
        nudge(source)
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=2)
        here.add(replica)
        here.wait(1)
        assert here.sender.send_weights().version == version + 1
        assert bits_equal(source, replica)


class Half(nn.Module):
    """Some of a model's parameters: a pipeline rank."""

    def __init__(self, whole: nn.Module, names: list[str]) -> None:
        super().__init__()
        for name in names:
            data = whole.get_parameter(name).data.clone()
            self.register_parameter(name, nn.Parameter(data, requires_grad=False))


def holds_the_same(source: nn.Module, part: nn.Module) -> bool:
    return all(
        torch.equal(as_bits(parameter), as_bits(source.get_parameter(name)))
        for name, parameter in part.named_parameters()
    )


def test_an_engine_of_two_ranks_joins_whole_and_commits_whole() -> None:
    source, other = model(), model(3)
    halves = [Half(other, ["embed", "norm"]), Half(other, ["layer", "norm"])]
    with fleet(source) as here:
        here.add(halves[0], rank=0, world=2)
        here.wait(1)
        with pytest.raises(NoReceivers):
            here.sender.send_weights()
        here.add(halves[1], rank=1, world=2)
        here.wait(2)
        assert here.sender.send_weights().receivers == 2
        nudge(source)
        assert here.sender.send_weights().receivers == 2
        assert all(holds_the_same(source, half) for half in halves)


def test_an_engine_that_loses_a_rank_between_syncs_is_no_member() -> None:
    source, other = model(), model(3)
    halves = [Half(other, ["embed", "norm"]), Half(other, ["layer", "norm"])]
    with fleet(source) as here:
        for rank, half in enumerate(halves):
            here.add(half, rank=rank, world=2)
        here.wait(2)
        version = here.sender.send_weights().version
        here.serving.pop("engine/1").stop()
        with pytest.raises(SyncAborted, match=r"engine\[0/2\].*engine\[1/2\]"):
            here.sender.send_weights()
        assert here.sender.num_receivers == 0
        here.add(halves[1], rank=1, world=2)
        here.wait(2)
        nudge(source)
        assert here.sender.send_weights().version == version + 1
        assert all(holds_the_same(source, half) for half in halves)


def test_ranks_that_do_not_cover_the_model_are_refused_by_name() -> None:
    source = model()
    with fleet(source) as here:
        for rank in range(2):
            here.add(Half(source, ["embed", "norm"]), rank=rank, world=2)
        here.wait(2)
        with pytest.raises(SyncAborted, match="engine takes nothing of 'layer'"):
            here.sender.send_weights()
        wait_for(lambda: bool(here.serving["engine/0"].errors))
        error = here.serving["engine/0"].errors[0]
        assert isinstance(error, Refused)
        assert "layer" in str(error)


@pytest.mark.promise(
    "All or nothing",
    "If one rank of an engine cannot commit, its other ranks put the old version back; other "
    "engines keep the new one.",
)
def test_one_rank_that_cannot_commit_undoes_its_whole_engine_and_no_other() -> None:
    source = model()
    halves = [Half(source, ["embed", "norm"]), Half(source, ["layer", "norm"])]
    single = model()
    transport = inprocess.Sender()
    sender = WeightSender(ModuleSource(source), transport)
    stubborn = Stubborn(halves[1])
    receivers = [
        WeightReceiver(ModuleTarget(halves[0]), transport.receiver(), rank=0, world=2),
        WeightReceiver(stubborn, transport.receiver(), rank=1, world=2),
        WeightReceiver(ModuleTarget(single), transport.receiver(), engine="single"),
    ]
    serving = [Serving(receiver).start() for receiver in receivers]
    try:
        sender.wait_for_receivers(3, timeout_s=10)
        sender.send_weights()
        before = [p.clone() for p in halves[0].parameters()]
        nudge(source)
        stubborn.fails = True
        stats = sender.send_weights(timeout_s=5)
        assert stats.receivers == 1
        assert set(stats.lost) == {"engine[1/2]"}
        assert "TargetMoved" in stats.lost["engine[1/2]"]
        assert bits_equal(source, single)
        wait_for(lambda: bool(serving[0].errors))
        assert isinstance(serving[0].errors[0], SyncAborted)
        now = list(halves[0].parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert not receivers[0].is_dirty
        sender.wait_for_receivers(3, timeout_s=10)
        assert sender.send_weights(timeout_s=5).receivers == 3
        assert all(holds_the_same(source, half) for half in halves)
    finally:
        sender.close()
        for each in serving:
            each.stop()


def test_digests_are_of_the_version_that_was_put_back() -> None:
    source = model()
    halves = [Half(source, ["embed", "norm"]), Half(source, ["layer", "norm"])]
    stubborn = Stubborn(halves[1])
    with inprocess.Sender() as transport, ThreadPoolExecutor(2) as pool:
        sender = WeightSender(ModuleSource(source), transport)
        receivers = [
            WeightReceiver(target, transport.receiver(), rank=rank, world=2)
            for rank, target in enumerate((ModuleTarget(halves[0]), stubborn))
        ]
        first = [pool.submit(receiver.receive_weights, timeout_s=10) for receiver in receivers]
        sender.wait_for_receivers(2, timeout_s=10)
        sender.send_weights(timeout_s=5)
        assert {call.result() for call in first} == {1}
        held = receivers[0].digests()
        nudge(source)
        stubborn.fails = True
        second = [pool.submit(receiver.receive_weights, timeout_s=10) for receiver in receivers]
        with pytest.raises(SyncAborted):
            sender.send_weights(timeout_s=5)
        assert isinstance(second[0].exception(), SyncAborted)
        assert isinstance(second[1].exception(), TargetMoved)
        assert receivers[0].digests() == held
        for receiver in receivers:
            receiver.close()


def test_who_has_greeted_and_gone_is_not_waited_for() -> None:
    transport = inprocess.Sender()
    sender = WeightSender(ModuleSource(model()), transport)
    gone = transport.receiver()
    receiver = WeightReceiver(ModuleTarget(model()), gone)
    with pytest.raises(TransportTimeout):
        receiver.receive_weights(timeout_s=0.01)
    sender.wait_for_receivers(1)
    receiver.close()
    with pytest.raises(TransportTimeout):
        sender.wait_for_receivers(1, timeout_s=0.1)
    sender.close()


def test_two_receivers_of_one_name_are_told_apart() -> None:
    source = model()
    with fleet(source) as here:
        first = here.add(model())
        here.wait(1)
        here.sender.send_weights()
        here.serving.clear()
        second = here.add(model())
        here.wait(2)
        here.sender.send_weights()
        wait_for(lambda: bool(second.errors))
        assert isinstance(second.errors[0], Refused)
        assert "member already" in str(second.errors[0])
        first.stop()


@pytest.mark.promise("Errors", "`LayoutMismatch`: models that differ are refused by name.")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(2))), "extra"),
        (lambda m: m.__delattr__("norm"), "norm"),
        (lambda m: m.register_parameter("norm", nn.Parameter(torch.zeros(17))), "norm"),
    ],
)
def test_models_that_differ_are_refused_by_name(change: object, said: str) -> None:
    replica = model()
    change(replica)  # type: ignore[operator]
    with fleet(model()) as here:
        here.add(replica)
        here.wait(1)
        with pytest.raises(SyncAborted, match=f"engine: refused: .*{said}"):
            here.sender.send_weights()
        wait_for(lambda: bool(here.serving["engine/0"].errors))
        error = here.serving["engine/0"].errors[0]
        assert isinstance(error, Refused)
        assert error.kind == LayoutMismatch.__name__
        assert said in str(error)


def test_strided_parameters_that_share_bytes_are_refused_by_name() -> None:
    w = torch.zeros(8, 10)
    with fleet(Model({"a": torch.ones(8, 6), "b": torch.full((8, 6), 2.0)})) as here:
        serving = here.add(Model({"a": w[:, :6], "b": w[:, 4:]}))
        here.wait(1)
        with pytest.raises(SyncAborted):
            here.sender.send_weights()
        wait_for(lambda: bool(serving.errors))
        assert isinstance(serving.errors[0], LayoutMismatch)
        assert "'a', 'b' share memory" in str(serving.errors[0])
    assert not w.any()


def test_strided_parameters_that_interleave_are_synced() -> None:
    w = torch.zeros(8, 10)
    views = {"a": w[::2, :6], "b": w[1::2, :6], "c": w[:, 6:]}
    source, replica = Model({n: torch.randn(v.shape) for n, v in views.items()}), Model(views)
    with fleet(source) as here:
        here.add(replica)
        here.wait(1)
        here.sender.send_weights()
        nudge(source)
        assert here.sender.send_weights().kind == "delta"
        assert bits_equal(source, replica)
    assert w.all()


def test_receivers_of_another_dtype_are_refused_and_an_override_settles_who_is_right() -> None:
    source = model(dtype=torch.float32)
    with fleet(source) as here:
        here.add(model(dtype=torch.bfloat16), engine="half")
        here.wait(1)
        here.add(model(dtype=torch.float32), engine="single")
        here.wait(2)
        assert here.sender.send_weights().receivers == 1
        wait_for(lambda: bool(here.serving["single/0"].errors))
        assert "bfloat16" in str(here.serving["single/0"].errors[0])
    options = SenderOptions(wire_dtypes={"*": "float32"})
    with fleet(source, options=options) as here:
        here.add(model(dtype=torch.bfloat16), engine="half")
        here.wait(1)
        here.add(model(dtype=torch.float32), engine="single")
        here.wait(2)
        stats = here.sender.send_weights()
        assert stats.receivers == 1
        assert here.serving["single/0"].receiver.state is not ReceiverState.OUTSIDE


@pytest.mark.promise("Bits", "float32 masters are compared as torch casts them.")
def test_fp32_masters_are_compared_as_their_bf16_cast() -> None:
    source, replica = model(dtype=torch.float32), model(1)
    with fleet(source) as here:
        here.add(replica)
        here.wait(1)
        here.sender.send_weights()
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(1 + 1e-5)  # below half an ULP of most bf16 elements
        stats = here.sender.send_weights()
        assert 0 < stats.nnz < stats.numel / 10
        assert bits_equal(source.to(torch.bfloat16), replica)


@pytest.mark.promise("Cost", "The snapshot may live on the host.")
def test_the_snapshot_may_live_on_the_host() -> None:
    source, replica = model(), model(1)
    with fleet(source, options=SenderOptions(snapshot_device="cpu")) as here:
        here.add(replica)
        here.wait(1)
        here.sender.send_weights()
        nudge(source)
        here.sender.send_weights()
        assert bits_equal(source, replica)


@pytest.mark.promise("Errors", "`SourceChanged`: members keep what they hold.")
def test_a_source_that_is_another_model_now_is_refused_and_members_stay() -> None:
    source, replica = model(), model()
    with fleet(source) as here:
        here.add(replica)
        here.wait(1)
        here.sender.send_weights()
        kept = source.norm
        source.norm = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        with pytest.raises(SourceChanged, match="norm"):
            here.sender.send_weights()
        source.norm = kept
        nudge(source)
        assert here.sender.send_weights().kind == "delta"
        assert bits_equal(source, replica)


@pytest.mark.promise("Checks", "Replaced storage is detected before what is staged is written.")
def test_replaced_target_storage_is_noticed_before_a_decision_and_bound_anew() -> None:
    source, replica = model(), model(1)
    with fleet(source) as here:
        serving = here.add(replica)
        here.wait(1)
        here.sender.send_weights()
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
        assert not serving.receiver.is_dirty


def test_storage_is_looked_at_once_for_each_sync_before_it_begins() -> None:
    seen: list[str] = []

    class Watched(ModuleTarget):
        def check_unmoved(self) -> None:
            super().check_unmoved()
            seen.append("storage")

    class Listening(ThroughReceiver):
        def receive(self, *, timeout_s: float) -> Frame:
            frame = super().receive(timeout_s=timeout_s)
            seen.append(decode(frame.header)[0].kind)
            return frame

    source, transport = model(), inprocess.Sender()
    sender = WeightSender(ModuleSource(source), transport)
    receiver = WeightReceiver(Watched(model(1)), Listening(transport.receiver()))
    with ThreadPoolExecutor(1) as engine:
        versions = engine.submit(lambda: [receiver.receive_weights() for _ in range(2)])
        sender.wait_for_receivers(1, timeout_s=10)
        sender.send_weights()
        nudge(source)
        sender.send_weights()
        assert versions.result(10) == [1, 2]
    sender.close()
    last = seen[seen.index("upcoming") :]
    assert last == ["upcoming", "storage", "begin", "bucket", "prepare", "commit"]


def test_replaced_source_storage_is_noticed() -> None:
    source, replica = model(), model()
    with fleet(source) as here:
        here.add(replica)
        here.wait(1)
        here.sender.send_weights()
        source.layer = nn.Parameter(source.get_parameter("layer").data.clone() * 2)
        source.get_parameter("norm").data = source.get_parameter("norm").data * 2
        here.sender.send_weights()
        assert bits_equal(source, replica)


def test_invalidate_refuses_deltas_until_rejoined() -> None:
    source, replica = model(), model()
    with fleet(source) as here:
        serving = here.add(replica)
        here.wait(1)
        here.sender.send_weights()
        with torch.no_grad():
            replica.get_parameter("layer").zero_()
        serving.receiver.invalidate()
        assert serving.receiver.version is None
        settle(here, source, replica)


@pytest.mark.promise(
    "Checks",
    "The scrub checks all weights within 64 syncs and names what changed; a full sync repairs it.",
)
def test_a_flipped_bit_in_an_untouched_element_is_found_by_the_scrub_and_healed() -> None:
    source, replica = model(), model()
    options = ReceiverOptions(scrub_every=4, chunk_numel=16)
    with fleet(source) as here:
        serving = here.add(replica, options=options)
        here.wait(1)
        here.sender.send_weights()
        as_bits(replica.get_parameter("layer").data)[3, 3] ^= 1
        settle(here, source, replica, turns=20)
        found = [error for error in serving.errors if isinstance(error, DirtyReceiver)]
        assert found
        assert "layer" in str(found[0])


@pytest.mark.promise("Checks", "A delta on wrong weights is refused before it is written.")
@pytest.mark.parametrize("max_staged_bytes", [0, None])
def test_wrong_weights_under_a_delta_are_caught_before_any_write(
    max_staged_bytes: int | None,
) -> None:
    """A delta on a wrong base: the predicted digest differs, so no version is decided."""
    source, replica = model(), model()
    options = ReceiverOptions(scrub_every=0, max_staged_bytes=max_staged_bytes)
    with fleet(source) as here:
        here.add(replica, options=options)
        here.wait(1)
        version = here.sender.send_weights().version
        swap = replica.get_parameter("embed").data.view(-1)
        swap[[0, 1]] = swap[[1, 0]]
        as_bits(source.get_parameter("embed").data).view(-1)[0] ^= 1
        with pytest.raises(SyncAborted, match="DigestMismatch"):
            here.sender.send_weights(timeout_s=5)
        assert here.sender.version == version
        settle(here, source, replica)


@pytest.mark.promise(
    "Cost",
    "Memory beyond weights and snapshot stays within the bounds of the options.",
)
def test_memory_is_bounded_on_both_sides() -> None:
    source, replica = model(), model()
    options = SenderOptions(
        max_inflight_bytes=200, bucket_bytes=512, policy=Policy(dense_above=0.9, chunk_numel=64)
    )
    with fleet(source, options=options) as here:
        here.add(replica, options=ReceiverOptions(max_staged_bytes=1000))
        here.wait(1)
        here.sender.send_weights()
        nudge(source, 300)
        stats = here.sender.send_weights()
        assert stats.sender_bytes <= 200 + 2 * 512
        assert stats.receiver_bytes <= 1000
        assert stats.num_buckets > 3
        assert bits_equal(source, replica)


@pytest.mark.promise("Cost", "What is sent and staged grows with what changed, not with the model.")
def test_what_is_sent_and_staged_does_not_grow_with_the_model() -> None:
    took = []
    for numel in (1 << 17, 1 << 22):
        source, replica = random_model({"w": (numel,)}, 0), random_model({"w": (numel,)}, 0)
        with fleet(source) as here:
            here.add(replica)
            here.wait(1)
            here.sender.send_weights()
            as_bits(source.get_parameter("w").data)[:: numel // 500] ^= 1
            took.append(here.sender.send_weights())
            assert bits_equal(source, replica)
    small, large = took
    assert small.nnz == pytest.approx(large.nnz, rel=0.1)
    assert large.payload_bytes < 1.5 * small.payload_bytes
    assert large.receiver_bytes < 1.5 * small.receiver_bytes


@pytest.mark.promise(
    "All or nothing",
    "A sync larger than `max_staged_bytes` is written in place. If it breaks off, a receiver "
    "that has written something is dirty, refuses to serve, and is repaired by a full sync.",
)
def test_a_sync_too_large_to_stage_is_written_in_place_by_commit() -> None:
    source, replica = model(), model(1)
    transport = inprocess.Sender()
    sender = WeightSender(ModuleSource(source), transport)
    receiver = WeightReceiver(
        ModuleTarget(replica), transport.receiver(), options=ReceiverOptions(max_staged_bytes=0)
    )
    before = [p.clone() for p in replica.parameters()]

    class Paused(Serving):
        def _turn(self) -> None:
            assert receiver.stage(timeout_s=10)
            assert receiver.state is ReceiverState.STAGING  # nothing is kept for `commit`
            now = list(replica.parameters())
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
            self.versions.append(receiver.commit())
            self._stop.set()

    serving = Paused(receiver).start()
    sender.wait_for_receivers(1, timeout_s=10)
    assert sender.send_weights().full_synced == 1
    sender.close()
    serving.stop()
    assert serving.versions == [1]
    assert bits_equal(source, replica)
    assert not receiver.is_dirty


@pytest.mark.promise(
    "All or nothing",
    "A sync larger than `max_staged_bytes` is written in place. If it breaks off, a receiver "
    "that has written something is dirty, refuses to serve, and is repaired by a full sync.",
)
def test_breaking_off_in_place_is_dirty_refuses_to_serve_and_heals() -> None:
    source, replica = model(), model(1)
    with fleet(source, options=SenderOptions(bucket_bytes=256)) as here:
        serving = here.add(
            replica,
            options=ReceiverOptions(max_staged_bytes=0, stall_timeout_s=5),
            wrap=lambda inner: BreaksOff(inner, after=6),
        )
        here.wait(1)
        with pytest.raises(SyncAborted):
            here.sender.send_weights(timeout_s=5)
        wait_for(lambda: serving.receiver.is_dirty)
        with pytest.raises(DirtyReceiver):
            serving.receiver.check_serving()
        settle(here, source, replica)
        wait_for(lambda: not serving.receiver.is_dirty)
        serving.receiver.check_serving()


class BreaksOff(ThroughReceiver):
    """Loses the connection once, after some frames."""

    def __init__(self, inner: ReceiveTransport, *, after: int) -> None:
        super().__init__(inner)
        self._left = after

    def receive(self, *, timeout_s: float) -> Frame:
        self._left -= 1
        if self._left == 0:
            self._inner.connect(b"not a hello", timeout_s=timeout_s)
        return self._inner.receive(timeout_s=timeout_s)


class Nested(ModuleSource):
    """Sends weights while they are read."""

    sender: WeightSender | None = None
    refused = 0

    def tensors(self) -> list[NamedTensor]:
        if self.sender is not None:
            with pytest.raises(ConfigError, match="used by one thread"):
                self.sender.send_weights()
            self.refused += 1
        return super().tensors()


def test_a_call_within_a_call_is_refused_and_costs_nothing() -> None:
    source = Nested(model())
    with fleet(source) as here:
        here.add(model())
        here.wait(1)
        source.sender = here.sender
        assert here.sender.send_weights().receivers == 1
        assert source.refused


@pytest.mark.promise(
    "All or nothing",
    "A lost receiver or a restarted trainer rejoins by digest if the weights match, otherwise "
    "by a full sync.",
)
def test_a_restarted_trainer_sends_nothing_to_receivers_that_agree() -> None:
    source, replica = model(), model()
    with fleet(source) as first:
        serving = first.add(replica)
        first.wait(1)
        first.sender.send_weights()
        wait_for(lambda: serving.receiver.version == 1)
    with fleet(source) as second:
        second.add(replica)
        second.wait(1)
        stats: SyncStats = second.sender.send_weights()
        assert (stats.payload_bytes, stats.receivers) == (0, 1)
        assert second.sender.stream_id != first.sender.stream_id


def settle(here: Fleet, source: nn.Module, replica: nn.Module, *, turns: int = 6) -> None:
    """Sync until the replica has healed."""
    for _ in range(turns):
        nudge(source)
        here.wait(1)
        try:
            here.sender.send_weights(timeout_s=5)
        except SyncAborted:
            continue
    assert bits_equal(source, replica)


def wait_for(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_the_end_of_a_with_closes_either_end_of_a_sync() -> None:
    link, hub = inprocess.Sender(), inprocess.Sender()
    source, target = ModuleSource(model()), ModuleTarget(model())
    first, lane = link.receiver(), inprocess.Sender()
    group = TrainerGroup(hub, 2)
    with (
        WeightSender(source, link, group=group) as sender,
        WeightReceiver(target, first) as receiver,
        TrainerRank(source, lane, hub.receiver(), rank=1, world=2) as rank,
    ):
        assert (sender.version, receiver.version, rank.version) == (0, None, 0)
    for closed in (link, hub, lane):
        with pytest.raises(TransportClosed):
            closed.poll(timeout_s=0)
    with pytest.raises(TransportClosed):
        first.receive(timeout_s=0)
    other = inprocess.Sender()
    with TrainerGroup(other, 2):
        pass
    with pytest.raises(TransportClosed):
        other.poll(timeout_s=0)
