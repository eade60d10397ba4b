"""Errors of the runbook that need two ends which do not fit: what each end learns."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from deltasync import (
    ModuleSource,
    ModuleTarget,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSender,
)
from deltasync.delta.bits import as_bits
from deltasync.errors import (
    LimitExceeded,
    SyncAborted,
    TransportTimeout,
    UnsupportedVersion,
)
from deltasync.sync import receiver
from deltasync.testing.processes import Child
from deltasync.transports import shared_memory
from deltasync.wire import frame
from tests.sync.by_hand import JOINED, Hand, begin
from tests.sync.harness import fleet, random_model, until

pytestmark = pytest.mark.timeout(60)


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


def test_a_release_of_another_format_is_named_at_both_ends(tmp_path: Path) -> None:
    source = random_model({"w": (9,)}, 0)
    sender = WeightSender(ModuleSource(source), shared_memory.Sender(tmp_path / "socket"))
    with Child(next_release, str(tmp_path / "socket")) as child:
        with pytest.raises(TransportTimeout, match="UnsupportedVersion"):
            sender.wait_for_receivers(1, timeout_s=12)
        child.wait(timeout_s=20)
    sender.close()


def test_buckets_larger_than_a_receiver_accepts_are_refused_there() -> None:
    source, replica = random_model({"w": (3000,)}, 0), random_model({"w": (3000,)}, 1)
    before = as_bits(replica.get_parameter("w").data).clone()
    with fleet(source, options=SenderOptions(bucket_bytes=4096)) as here:
        serving = here.add(replica, options=ReceiverOptions(max_payload_bytes=2048))
        here.wait(1)
        with pytest.raises(SyncAborted):
            here.sender.send_weights()
        until(lambda: bool(serving.errors))
        assert isinstance(serving.errors[0], LimitExceeded)
        assert torch.equal(as_bits(replica.get_parameter("w").data), before)


def test_the_sender_may_be_silent_for_twice_its_own_timeout() -> None:
    hand = Hand()
    began = time.monotonic()
    error = hand.say([*JOINED, begin(timeout_s=0.5)])
    assert isinstance(error, TransportTimeout)
    assert 1.0 <= time.monotonic() - began < 20
    assert hand.is_untouched()
