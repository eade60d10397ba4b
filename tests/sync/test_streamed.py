"""Weights that come one after another, and receivers that take whatever is sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltasync import (
    ModuleTarget,
    Policy,
    SenderOptions,
    TrainerGroup,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.dtypes import BY_NAME
from deltasync.errors import (
    ConfigError,
    DeltaSyncError,
    NoReceivers,
    SourceChanged,
    SyncAborted,
    TargetMoved,
    TransportTimeout,
)
from deltasync.sync.source.streamed import StreamedWeights
from deltasync.sync.target.copied import CopiedTarget
from deltasync.transports import inprocess
from deltasync.wire.messages import ParameterSpec
from tests.worlds.links import Serving, until

Weights = dict[str, Tensor]
SHAPES = {"a": (40, 9), "b": (7,), "none": (0, 3), "scalar": (), "c": (300,)}


class Trainer:
    """Streams its weights through memory that is used again."""

    def __init__(self, options: SenderOptions | None = None, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.weights = {n: torch.randn(s, generator=self.random) for n, s in SHAPES.items()}
        self.link = inprocess.Sender()
        self.stream = StreamedWeights(options)
        self.sender = WeightSender(self.stream, self.link)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            gathered = tensor.clone()
            yield name, gathered
            gathered.fill_(-7)

    def step(self, share: float) -> None:
        for tensor in self.weights.values():
            mask = torch.rand(tensor.shape, generator=self.random) < share
            tensor[mask] += 1

    def sync(self) -> None:
        self.stream.take(self.exported())
        self.sender.send_weights(timeout_s=10)


class Copy(CopiedTarget):
    """Refuses a version before it is decided, once it is told to."""

    fails = False

    def check_unmoved(self) -> None:
        if self.fails:
            self.fails = False
            raise TargetMoved("planted")


class Rollout:
    def __init__(self, trainer: Trainer, name: str = "engine") -> None:
        self.target = Copy()
        self.receiver = WeightReceiver(self.target, trainer.link.receiver(), engine=name)
        self.serving = Serving(self.receiver).start()

    def holds(self, weights: Weights) -> bool:
        copy = self.target.tensors
        return copy.keys() == weights.keys() and all(
            torch.equal(as_bits(copy[name]), as_bits(tensor)) for name, tensor in weights.items()
        )


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.02, 0.5, 1.0]),
            st.sampled_from(["sent", "taken", "torn", "refused"]),
        ),
        max_size=6,
    ),
    seed=st.integers(0, 1 << 16),
    chunk_numel=st.sampled_from([16, 64, None]),
    max_inflight_bytes=st.sampled_from([0, 200, None]),
)
def test_every_version_is_exact_whatever_comes_to_nothing(
    steps: list[tuple[float, str]],
    seed: int,
    chunk_numel: int | None,
    max_inflight_bytes: int | None,
) -> None:
    options = SenderOptions(
        policy=Policy(chunk_numel=chunk_numel),
        max_inflight_bytes=max_inflight_bytes,
        bucket_bytes=512,
    )
    trainer = Trainer(options, seed)
    rollout = Rollout(trainer)
    try:
        trainer.sender.wait_for_receivers(1)
        trainer.sync()
        for share, outcome in steps:
            trainer.step(share)
            if outcome == "sent":
                trainer.sync()
                until(lambda: rollout.receiver.version == trainer.sender.version)
                assert rollout.holds(trainer.weights)
            elif outcome == "taken":  # then given up
                trainer.stream.take(trainer.exported())
            elif outcome == "torn":
                with pytest.raises(SourceChanged, match="3 tensors did not come"):
                    trainer.stream.take(islice(trainer.exported(), 2))
            else:
                trainer.step(0.5)  # who joins anew is written to only if something differs
                rollout.target.fails = True
                with pytest.raises(SyncAborted, match="planted"):
                    trainer.sync()
                trainer.sender.wait_for_receivers(1)
        trainer.sync()
        assert rollout.holds(trainer.weights)
    finally:
        rollout.serving.stop()


def test_a_receiver_that_fails_does_not_cost_the_others_the_version() -> None:
    trainer = Trainer(SenderOptions(policy=Policy(chunk_numel=16, dense_above=0.3)))
    good, bad = Rollout(trainer, "good"), Rollout(trainer, "bad")
    trainer.sender.wait_for_receivers(2)
    trainer.sync()
    bad.target.fails = True
    trainer.step(0.4)  # some chunks go dense, and are in the snapshot when that is tried again
    trainer.sync()
    assert good.holds(trainer.weights)
    until(lambda: bool(bad.serving.errors))
    assert "planted" in str(bad.serving.errors[0])
    trainer.sender.wait_for_receivers(2)
    trainer.step(0.4)
    trainer.sync()
    assert good.holds(trainer.weights)
    until(lambda: bad.receiver.version == trainer.sender.version)
    assert bad.holds(trainer.weights)
    good.serving.stop()
    bad.serving.stop()


def test_a_version_that_nobody_took_is_covered_by_the_next() -> None:
    trainer = Trainer(SenderOptions(policy=Policy(chunk_numel=16, dense_above=0.3)))
    rollout = Rollout(trainer)
    trainer.sender.wait_for_receivers(1)
    trainer.sync()
    rollout.target.fails = True
    trainer.step(0.4)
    with pytest.raises(SyncAborted, match="planted"):
        trainer.sync()
    trainer.sender.wait_for_receivers(1)
    trainer.step(0.01)
    trainer.sync()
    until(lambda: rollout.receiver.version == trainer.sender.version)
    assert rollout.holds(trainer.weights)
    rollout.serving.stop()


def test_all_receivers_may_be_new() -> None:
    trainer = Trainer()
    first = Rollout(trainer)
    trainer.sender.wait_for_receivers(1)
    trainer.sync()
    first.serving.stop()
    trainer.step(0.02)
    trainer.stream.take(trainer.exported())
    with pytest.raises((NoReceivers, SyncAborted)):
        trainer.sender.send_weights(timeout_s=1)
    second = Rollout(trainer)
    trainer.sender.wait_for_receivers(1)
    trainer.step(0.02)
    trainer.sync()
    until(lambda: second.receiver.version == trainer.sender.version)
    assert second.holds(trainer.weights)
    second.serving.stop()


def test_engines_that_are_not_retained_keep_their_weights() -> None:
    trainer = Trainer()
    kept, other = Rollout(trainer, "kept"), Rollout(trainer, "other")
    trainer.sender.wait_for_receivers(2)
    trainer.sync()
    before = {name: tensor.clone() for name, tensor in other.target.tensors.items()}
    other.serving.stop()
    trainer.sender.retain({"kept"})
    stranger = Rollout(trainer, "stranger")
    trainer.step(0.1)
    trainer.sync()
    with pytest.raises(TransportTimeout):
        trainer.sender.wait_for_receivers(2, timeout_s=0.2)
    stranger.serving.stop()
    assert "other engines" in str(stranger.serving.errors[0])
    assert kept.holds(trainer.weights)
    assert other.holds(before)
    assert trainer.sender.engines == {"kept"}
    kept.serving.stop()


def test_digests_tell_which_parameters_changed() -> None:
    trainer = Trainer()
    rollout = Rollout(trainer)
    trainer.sender.wait_for_receivers(1)
    trainer.sync()
    before = rollout.receiver.digests()
    trainer.weights["b"][3] += 1
    trainer.sync()
    after = rollout.receiver.digests()
    assert before.keys() == after.keys() == SHAPES.keys()
    assert {name for name in after if before[name] != after[name]} == {"b"}
    rollout.serving.stop()


def test_tensors_may_come_in_another_order() -> None:
    trainer = Trainer()
    rollout = Rollout(trainer)
    trainer.sender.wait_for_receivers(1)
    trainer.sync()
    trainer.step(0.1)
    trainer.weights = dict(reversed(trainer.weights.items()))
    trainer.sync()
    assert rollout.holds(trainer.weights)
    rollout.serving.stop()


def test_only_the_snapshot_is_kept_between_syncs() -> None:
    trainer = Trainer(SenderOptions(policy=Policy(dense_above=1)))
    rollout = Rollout(trainer)
    trainer.sender.wait_for_receivers(1)
    trainer.sync()
    trainer.step(0.5)
    trainer.sync()
    with pytest.raises(ConfigError, match="take them"):
        trainer.stream.delta(2)
    with pytest.raises(ConfigError, match="take them"):
        trainer.sender.send_weights(timeout_s=5)
    trainer.sync()
    rollout.serving.stop()


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"a": torch.zeros(9, 40)}, "shape"),
        ({"new": torch.zeros(3)}, "'new' is new"),
        ({"a": torch.zeros(40, 9, dtype=torch.int32)}, "cannot be sent"),
    ],
)
def test_weights_of_another_model_are_refused_and_gone_through(
    other: Weights, problem: str
) -> None:
    trainer = Trainer()
    trainer.stream.take(trainer.exported())
    seen: list[str] = []

    def exported(weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            seen.append(name)
            yield name, tensor

    with pytest.raises(DeltaSyncError, match=problem):
        trainer.stream.take(exported(trainer.weights | other))
    assert len(seen) == len(trainer.weights | other)
    with pytest.raises(SourceChanged, match="4 tensors did not come"):
        trainer.stream.take(exported({"b": trainer.weights["b"] + 1}))


def test_what_does_not_fit_a_stream_is_refused() -> None:
    stream = StreamedWeights()
    with pytest.raises(ConfigError, match="no weights came"):
        stream.take(iter(()))
    with pytest.raises(ConfigError, match="no weights were taken"):
        stream.full()
    with pytest.raises(ConfigError, match="twice"):
        StreamedWeights().take([("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(ConfigError, match="options"):
        WeightSender(stream, inprocess.Sender(), options=SenderOptions())
    with pytest.raises(ConfigError, match="group"):
        WeightSender(stream, inprocess.Sender(), group=TrainerGroup(inprocess.Sender(), 2))


def test_an_engine_that_holds_nothing_and_takes_nothing_is_told_so() -> None:
    trainer = Trainer()
    trainer.stream.take(trainer.exported())
    receiver = WeightReceiver(ModuleTarget(torch.nn.Module()), trainer.link.receiver())
    serving = Serving(receiver).start()
    trainer.sender.wait_for_receivers(1)
    with pytest.raises(SyncAborted):
        trainer.sender.send_weights(timeout_s=5)
    serving.stop()
    assert "none of the parameters" in str(serving.errors[0])


def test_what_the_options_leave_out_does_not_travel() -> None:
    trainer = Trainer(SenderOptions(leave_out=["[ab]"]))
    rollout = Rollout(trainer)
    trainer.sender.wait_for_receivers(1)
    for share in (0.0, 0.5):
        trainer.step(share)
        trainer.sync()
        left = {n: t for n, t in trainer.weights.items() if n not in ("a", "b")}
        until(lambda left=left: rollout.holds(left))  # type: ignore[misc]
    rollout.serving.stop()


def test_one_pattern_is_no_list_of_patterns() -> None:
    with pytest.raises(ValueError, match="leave_out"):
        SenderOptions(leave_out="lm_head.weight")


def spec(name: str, dtype: str, *shape: int) -> ParameterSpec:
    return ParameterSpec((name,), shape, BY_NAME[dtype])


ANNOUNCED = [spec(name, "float32", *shape) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("is_announced", [True, False])
def test_masters_are_sent_in_the_dtypes_that_the_first_engine_holds(is_announced: bool) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=random) for n, s in SHAPES.items()}
    replica = torch.nn.ParameterDict({n: torch.zeros(s).bfloat16() for n, s in SHAPES.items()})
    stream = StreamedWeights(announced=ANNOUNCED if is_announced else ())
    link = inprocess.Sender()
    with WeightSender(stream, link) as sender:
        serving = Serving(WeightReceiver(ModuleTarget(replica), link.receiver())).start()
        sender.wait_for_receivers(1)
        for factor in (1.0, 1.001, 3.0):
            for tensor in weights.values():
                tensor *= factor
            stream.take(weights.items())
            stats = sender.send_weights(timeout_s=10)
            assert list(stream.declared()) == ANNOUNCED  # in the trainer's own dtypes
            until(lambda: all(torch.equal(replica[n], w.bfloat16()) for n, w in weights.items()))
        assert (stats.kind, stats.dense_bytes) == (
            "delta",
            2 * sum(w.numel() for w in weights.values()),
        )
        serving.stop()


def test_an_engine_of_other_dtypes_than_the_first_is_refused() -> None:
    stream, link = StreamedWeights(), inprocess.Sender()
    with WeightSender(stream, link) as sender:

        def sync_with(dtype: torch.dtype) -> None:
            replica = torch.nn.ParameterDict({"a": torch.zeros(5, dtype=dtype)})
            serving = Serving(WeightReceiver(ModuleTarget(replica), link.receiver())).start()
            try:
                sender.wait_for_receivers(1)
                stream.take([("a", torch.ones(5))])
                sender.send_weights(timeout_s=10)
            finally:
                serving.stop()
            until(lambda: sender.wait_for_receivers(0) or sender.num_receivers == 0)  # type: ignore[func-returns-value]

        sync_with(torch.bfloat16)
        with pytest.raises(SyncAborted, match="other dtypes than earlier ones"):
            sync_with(torch.float32)
        sync_with(torch.bfloat16)


@pytest.mark.parametrize(
    ("came", "problem"),
    [
        ({"a": torch.ones(2, 3)}, r"a: float32\[3, 2\] was announced, and a: float32\[2, 3\] came"),
        ({"a": torch.ones(3, 2).half()}, r"float32\[3, 2\] was announced, and a: float16"),
        ({"b": torch.ones(1)}, r"a: float32\[3, 2\] was announced, and b: float32\[1\] came"),
        ({"a": torch.ones(3, 2)}, r"b: float32\[1\] was announced, and nothing came"),
        (
            {"a": torch.ones(3, 2), "b": torch.ones(1), "c": torch.ones(())},
            r"nothing was announced, and c: float32\[\] came",
        ),
    ],
)
def test_what_comes_otherwise_than_it_was_announced_is_refused(came: Weights, problem: str) -> None:
    announced = [
        spec("a", "float32", 3, 2),
        spec("left.out", "float32", 9),
        spec("b", "float32", 1),
    ]
    stream = StreamedWeights(SenderOptions(leave_out=["left.*"]), announced=announced)
    right = {"a": torch.ones(3, 2), "b": torch.ones(1)}
    with pytest.raises(SourceChanged, match=problem):
        stream.take(came.items())
    assert [one.name for one in stream.declared()] == ["a", "b"]
    stream.take(right.items())
    assert [one.name for one in stream.declared()] == ["a", "b"]
