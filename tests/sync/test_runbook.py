"""Errors of the runbook that need two ends which do not fit: what each end learns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    Policy,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    DirtyReceiver,
    LimitExceeded,
    TransportTimeout,
    UnsupportedVersion,
)
from deltasync.sync import receiver
from deltasync.testing.processes import Child
from deltasync.transports import collective, inprocess, shared_memory
from deltasync.transports.base import ReceiveTransport, SendTransport
from deltasync.wire import frame
from tests.worlds.links import Serving, bits_equal, random_model, until
from tests.worlds.peers import JOINED, Hand, begin


def next_release(path: str) -> None:
    """A receiver of a release that has another wire format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "FORMAT_VERSION", 2)
        patch.setattr(receiver, "FORMAT_VERSION", 2)
        link = shared_memory.Receiver(path)
        follower = WeightReceiver(ModuleTarget(random_model({"w": (9,)}, 0)), link)
        with pytest.raises(UnsupportedVersion):
            follower.receive_weights(timeout_s=30)
        follower.close()


@pytest.mark.promise(
    "Errors",
    "`UnsupportedVersion`: both ends report a release with another format.",
)
def test_a_release_of_another_format_is_named_at_both_ends(tmp_path: Path) -> None:
    source = random_model({"w": (9,)}, 0)
    sender = WeightSender(ModuleSource(source), shared_memory.Sender(tmp_path / "socket"))
    with Child(next_release, str(tmp_path / "socket")) as child:
        until(lambda: "UnsupportedVersion" in refusal(sender))
        child.wait(timeout_s=20)
    sender.close()


def refusal(sender: WeightSender) -> str:
    """What waiting for a receiver that does not come says of those that did."""
    with pytest.raises(TransportTimeout) as late:
        sender.wait_for_receivers(1, timeout_s=0.1)
    return str(late.value)


def linked(kind: str, folder: Path) -> tuple[SendTransport, Callable[[], ReceiveTransport]]:
    if kind == "inprocess":
        inner = inprocess.Sender()
        return inner, inner.receiver
    if kind == "shared_memory":
        path = folder / "socket"
        return shared_memory.Sender(path), lambda: shared_memory.Receiver(path)
    link = collective.Sender()
    return link, lambda: collective.Receiver(*link.address)


@pytest.mark.promise(
    "Errors",
    "`SyncAborted`, `SyncStats.lost`: the trainer learns why a receiver failed, within a sync "
    "and between syncs.",
)
@pytest.mark.parametrize("kind", ["inprocess", "shared_memory", "collective"])
def test_why_a_receiver_fails_within_a_sync_is_named_at_both_ends(
    kind: str, tmp_path: Path
) -> None:
    """Here its limit is smaller than the sender's buckets, of which many are on their way."""
    source = random_model({"w": (30_000,)}, 0)
    link, connected = linked(kind, tmp_path)
    options = SenderOptions(bucket_bytes=4096, policy=Policy(dense_above=0))
    sender = WeightSender(ModuleSource(source), link, options=options)
    limits = {"small": ReceiverOptions(max_payload_bytes=2048), "large": ReceiverOptions()}
    models = {engine: random_model({"w": (30_000,)}, 0) for engine in limits}
    before = as_bits(source.get_parameter("w").data).clone()
    serving = {
        engine: Serving(
            WeightReceiver(ModuleTarget(models[engine]), connected(), engine=engine, options=limit)
        ).start()
        for engine, limit in limits.items()
    }
    sender.wait_for_receivers(2, timeout_s=20)
    sender.send_weights(timeout_s=20)
    as_bits(source.get_parameter("w").data).add_(1)
    stats = sender.send_weights(timeout_s=20)
    assert stats.lost.keys() == {"small[0/1]"}
    assert "LimitExceeded" in stats.lost["small[0/1]"]
    until(lambda: any(isinstance(error, LimitExceeded) for error in serving["small"].errors))
    sender.close()
    for each in serving.values():
        each.stop()
    assert bits_equal(source, models["large"])
    assert torch.equal(as_bits(models["small"].get_parameter("w").data), before)


@pytest.mark.promise(
    "Errors",
    "`SyncAborted`, `SyncStats.lost`: the trainer learns why a receiver failed, within a sync "
    "and between syncs.",
)
@pytest.mark.parametrize("kind", ["inprocess", "shared_memory", "collective"])
def test_why_a_receiver_left_between_syncs_is_named_by_the_trainer(
    kind: str, tmp_path: Path
) -> None:
    """Here its scrub has found corruption."""
    source, replica = random_model({"w": (300,)}, 0), random_model({"w": (300,)}, 0)
    link, connected = linked(kind, tmp_path)
    sender, options = WeightSender(ModuleSource(source), link), ReceiverOptions(scrub_every=1)
    serving = Serving(WeightReceiver(ModuleTarget(replica), connected(), options=options)).start()
    sender.wait_for_receivers(1, timeout_s=20)
    sender.send_weights(timeout_s=20)
    as_bits(replica.get_parameter("w").data)[299] ^= 1
    as_bits(source.get_parameter("w").data)[0] ^= 1
    sender.send_weights(timeout_s=20)
    until(lambda: any(isinstance(error, DirtyReceiver) for error in serving.errors))
    sender.wait_for_receivers(1, timeout_s=20)
    stats = sender.send_weights(timeout_s=20)
    sender.close()
    serving.stop()
    assert "DirtyReceiver: w: weights changed" in stats.lost["engine[0/1]"]
    assert stats.full_synced == 1
    assert bits_equal(source, replica)


@pytest.mark.promise(
    "Time",
    "A sender that is silent within a sync is lost after `stall_timeout_s`, but not before "
    "twice its own timeout.",
)
def test_the_sender_may_be_silent_for_twice_its_own_timeout() -> None:
    hand = Hand()
    began = time.monotonic()
    error = hand.say([*JOINED, begin(timeout_s=0.5)])
    assert isinstance(error, TransportTimeout)
    assert 1.0 <= time.monotonic() - began < 20
    assert hand.is_untouched()
