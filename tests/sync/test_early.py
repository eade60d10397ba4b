"""Deltas that are packed while the rest is compared: what arrives is what any delta brings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deltasync import ModuleSource, Policy, ReceiverOptions, SenderOptions, WeightSender
from deltasync.delta.backend import Kernels
from deltasync.delta.batched import backend, plans, source
from deltasync.delta.batched.plans import BatchedDelta
from deltasync.sync.protocol.round import SyncPhase
from deltasync.transports import inprocess
from deltasync.transports.base import Frame, SendTransport
from deltasync.wire.frame import decode
from deltasync.wire.messages import Begin, Bucket, Message
from tests.sync.harness import Model, Receivers, ThroughSender, bits_equal
from tests.sync.interpreted import one_kernel_at_a_time

__all__ = ["one_kernel_at_a_time"]  # pytest uses it
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = SenderOptions(
    kernels="triton", max_inflight_bytes=1 << 26, policy=Policy(chunk_numel=256), bucket_bytes=1500
)


def model(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    made = {
        "a": torch.randn(35, 30, generator=generator).bfloat16(),
        "b": torch.randn(500, generator=generator),
        "c": torch.randn(3, generator=generator).bfloat16(),
        "d": torch.randint(-99, 99, (500,), generator=generator, dtype=torch.int8),
        "e": torch.randn(20, 60, generator=generator).bfloat16(),
    }
    return Model({name: tensor.to(DEVICE) for name, tensor in made.items()})


def change(made: Model, seed: int, shares: dict[str, float]) -> dict[str, int]:
    """Flip a bit of shares of parameters. Returns how many of each."""
    generator, changed = torch.Generator().manual_seed(seed), {}
    for name, share in shares.items():
        weights = made.get_parameter(name).data.view(-1)
        mask = (torch.rand(weights.shape, generator=generator) < share).to(DEVICE)
        weights.view(torch.uint8).view(len(weights), -1)[mask, 0] ^= 1
        changed[name] = int(mask.sum())
    return changed


class Heard(ThroughSender):
    """A link that notes what is said; it fails at a bucket, after `left` others, if told to.

    Attributes:
        said: All messages.
        looks: What `look` returned at each bucket.
    """

    def __init__(self, inner: SendTransport) -> None:
        super().__init__(inner)
        self.said: list[Message] = []
        self.looks: list[bool] = []
        self.look: Callable[[], bool] = lambda: False
        self.left: int | None = None

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        num_bytes = 0 if frame.payload is None else len(frame.payload)
        self.said.append(decode(frame.header, arrived_bytes=num_bytes)[0])
        if isinstance(self.said[-1], Bucket):
            self.looks.append(self.look())
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise RuntimeError("planted")
        super().send(frame, timeout_s=timeout_s)

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        self.said.append(decode(header)[0])
        super().tell(peers, header, timeout_s=timeout_s)

    def kinds(self) -> list[str]:
        return [message.kind for message in self.said]


class Early(Receivers):
    """A sender that compares in small segments, and what it has said since the last `step`."""

    def __init__(self) -> None:
        self.trainer = model(0)
        link = inprocess.Sender()
        super().__init__([link])
        self.heard = Heard(link)
        self.sender = WeightSender(ModuleSource(self.trainer), self.heard, options=OPTIONS)
        self.seed = 0

    def step(self, shares: dict[str, float]) -> dict[str, int]:
        self.seed += 1
        self.heard.said.clear()
        self.heard.looks.clear()
        return change(self.trainer, self.seed, shares)

    def is_comparing(self) -> bool:
        masks = self.sender._own._held._masks  # type: ignore[attr-defined]
        return masks._comparing is not None


@contextmanager
def early(replica: Model, **options: Any) -> Iterator[Early]:
    here = Early()
    try:
        here.add(replica, options=ReceiverOptions(**options))
        here.wait(1)
        here.sender.send_weights()
        yield here
    finally:
        here.close()


@pytest.fixture(autouse=True)
def were_early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Makes segments small; says of each delta whether it was early."""
    monkeypatch.setattr(source, "_SEGMENT_BYTES", 800)
    monkeypatch.setattr(plans, "_LEAST_EARLY_BYTES", 1)
    monkeypatch.setattr(backend, "_MORE_BYTES", 1000)
    found: list[bool] = []
    begin = BatchedDelta.__init__

    def noted(self: BatchedDelta, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        found.append(options["most_bytes"] is not None)

    monkeypatch.setattr(BatchedDelta, "__init__", noted)
    return found


SMALL = {"a": 0.01, "b": 0.01, "d": 0.01, "e": 0.01}
SHARES = st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.0, 0.003, 0.05, 0.3, 1.0]))


@settings(  # the interpreter takes a second a sync, and far more when it is traced
    max_examples=6,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    history=st.lists(st.just(SMALL) | SHARES, min_size=2, max_size=4),
    kernels=st.sampled_from(["torch", "triton"]),
    max_staged_bytes=st.sampled_from([None, None, 0]),
)
def test_any_history_arrives(
    history: list[dict[str, float]], kernels: Kernels, max_staged_bytes: int | None
) -> None:
    replica = model(1)
    with early(replica, kernels=kernels, max_staged_bytes=max_staged_bytes) as here:
        for shares in history:
            changed = here.step(shares)
            stats = here.sender.send_weights()
            assert (stats.nnz, stats.lost, stats.receivers) == (sum(changed.values()), {}, 1)
            assert stats.parameters["changed"] == sum(map(bool, changed.values()))
            assert bits_equal(here.trainer, replica)
            kinds = here.heard.kinds()
            assert kinds.count("begin") - 1 == kinds.count("abort") <= 1


def test_buckets_leave_while_the_rest_is_compared(were_early: list[bool]) -> None:
    replica = model(1)
    with early(replica) as here:
        for _ in range(3):
            here.step(SMALL)
            here.heard.look = here.is_comparing
            stats = here.sender.send_weights()
            assert bits_equal(here.trainer, replica)
        assert were_early == [False, True, True]
        assert here.heard.looks[0]
        assert not here.heard.looks[-1]
        assert stats.num_buckets == len(here.heard.looks) >= 3
        begin = next(one for one in here.heard.said if isinstance(one, Begin))
        assert begin.sparse_bytes + begin.dense_bytes >= stats.payload_bytes // 4


def test_segments_of_few_changes_share_a_bucket(
    were_early: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = model(1)
    with early(replica) as here:
        for least_bytes, most in ((1 << 20, 1), (200, 3)):  # of about 100 bytes in each segment
            monkeypatch.setattr(plans, "_LEAST_EARLY_BYTES", least_bytes)
            for _ in range(2):
                here.step(SMALL)
                stats = here.sender.send_weights()
                assert bits_equal(here.trainer, replica)
            assert 1 <= stats.num_buckets <= most
            assert were_early[-1]


def test_what_did_not_change_is_known_at_the_end(were_early: list[bool]) -> None:
    replica, phases = model(1), list[SyncPhase]()
    with early(replica) as here:
        here.sender._on_phase = phases.append
        for shares in (SMALL, {}, SMALL, {}):
            here.step(shares)
            stats = here.sender.send_weights()
            assert bool(stats.nnz) == bool(shares)
            assert phases[-1].is_decided
            assert phases[-1].is_unchanged == (not shares)
        assert were_early == [False, True, True, True]
        assert here.heard.kinds() == ["upcoming", "begin", "prepare", "commit", "finish"]


def test_more_than_was_announced_is_compared_again(were_early: list[bool]) -> None:
    replica = model(1)
    with early(replica) as here:
        for shares in (SMALL, SMALL, {"a": 1.0, "b": 0.4, "e": 1.0}, SMALL):
            changed = here.step(shares)
            stats = here.sender.send_weights()
            assert stats.nnz == sum(changed.values())
            assert bits_equal(here.trainer, replica)
            kinds = here.heard.kinds()
            assert kinds.count("abort") == (1.0 in shares.values())
        assert were_early == [False, True, True, True]
        assert here.sender.num_receivers == 1


def test_dense_chunks_that_are_packed_again_count_once(were_early: list[bool]) -> None:
    """In the digests, which packing sums up."""
    replica = model(1)
    with early(replica) as here:
        for shares in ({"a": 1.0}, {"a": 1.0}, {"a": 1.0, "e": 1.0}):
            here.step(shares)
            assert here.sender.send_weights().lost == {}
            assert bits_equal(here.trainer, replica)
        kinds = here.heard.kinds()
        assert "bucket" in kinds[: kinds.index("abort")]
        assert were_early == [False, True, True]


def test_a_sync_that_breaks_off_is_covered_by_the_next() -> None:
    replica = model(1)
    with early(replica) as here:
        here.step(SMALL)
        here.sender.send_weights()
        for left in range(3):
            first = here.step(SMALL)
            here.heard.left = left
            with pytest.raises(RuntimeError, match="planted"):
                here.sender.send_weights()
            assert not bits_equal(here.trainer, replica)
            here.wait(1)
            second = here.step({"c": 1.0})
            stats = here.sender.send_weights()
            assert stats.kind == "delta"
            assert stats.nnz == sum(first.values()) + sum(second.values())
            assert bits_equal(here.trainer, replica)


def test_what_cannot_be_held_together_is_not_begun_twice_each_time(were_early: list[bool]) -> None:
    replica = model(1)
    with early(replica) as here:
        here.sender.options = OPTIONS.model_copy(update={"max_inflight_bytes": 4000})
        for _ in range(3):  # dense: all of it is announced, but it is more than there is room for
            here.step({"a": 1.0, "e": 1.0})
            here.sender.send_weights()
            assert "abort" not in here.heard.kinds()
            assert bits_equal(here.trainer, replica)
        assert were_early == [False] * 3


def test_no_more_is_announced_than_a_layout_has(were_early: list[bool]) -> None:
    replica = model(1)
    with early(replica) as here:
        here.sender.options = OPTIONS.model_copy(
            update={
                "policy": Policy(chunk_numel=256, dense_above=1.0),
                "bucket_bytes": 1 << 16,
            }
        )
        for _ in range(2):
            here.step(dict.fromkeys("abcde", 1.0))
            assert here.sender.send_weights().lost == {}
            assert bits_equal(here.trainer, replica)
        assert were_early == [False] * 2


def called_at(heard: Heard, bucket: int, call: Callable[[], None]) -> bool:
    """A `look` that calls something when a bucket is sent; buckets count from 0."""
    if len(heard.looks) == bucket:
        call()
    return False


@pytest.mark.parametrize("shares", [SMALL, {"a": 1.0, "b": 0.4, "e": 1.0}], ids=["small", "large"])
def test_who_leaves_in_the_middle_stops_nobody(
    shares: dict[str, float], were_early: list[bool]
) -> None:
    stays, leaves = model(1), model(2)
    with early(stays) as here:
        leaving = here.add(leaves, engine="leaving").receiver
        here.wait(2)
        for event, left in ((leaving.invalidate, 0), (leaving.detach, 1)):
            here.step(SMALL)
            here.sender.send_weights()
            here.step(shares)
            were_early.clear()
            here.heard.look = partial(called_at, here.heard, left, event)
            stats = here.sender.send_weights()
            here.heard.look = lambda: False
            assert were_early[0]
            assert stats.receivers == 1
            assert bits_equal(here.trainer, stays)
            assert not leaving.is_dirty
            leaving.attach()
            here.wait(2)
        here.sender.send_weights()
        assert bits_equal(here.trainer, leaves)
