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
    WeightReceiver,
    WeightSender,
    subscribe,
)
from deltasync.errors import (
    DirtyReceiver,
    NoReceivers,
    SyncAborted,
    TransportTimeout,
    UnsupportedVersion,
)
from deltasync.sync import receiver
from deltasync.sync.events import ReceiveStats, SyncEvent, SyncFailed
from deltasync.testing.processes import Child
from deltasync.transports import shared_memory
from deltasync.wire import frame
from tests.worlds.links import Model, bits_equal, random_model, until
from tests.worlds.peers import JOINED, Hand, begin
from tests.worlds.toy_engines import joined, recovers


def next_release(path: str) -> None:
    """A receiver of a release that has another wire format."""
    with pytest.MonkeyPatch.context() as patch:
        following = frame.FORMAT_VERSION + 1
        patch.setattr(frame, "FORMAT_VERSION", following)
        patch.setattr(receiver, "FORMAT_VERSION", following)
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
    source = ModuleSource(random_model({"w": (9,)}, 0))

    def refusal() -> str:
        """What waiting for a receiver that does not come says of those that did."""
        with pytest.raises(TransportTimeout) as late:
            sender.wait_for_receivers(1, timeout_s=0.1)
        return str(late.value)

    with (
        WeightSender(source, shared_memory.Sender(tmp_path / "socket")) as sender,
        Child(next_release, str(tmp_path / "socket")) as child,
    ):
        until(lambda: "UnsupportedVersion" in refusal())
        child.wait(timeout_s=60)


@pytest.mark.promise(
    "Errors",
    "`SyncAborted`, `SyncStats.lost`: the trainer learns why a receiver failed, within a sync "
    "and between syncs.",
)
@pytest.mark.promise(
    "Checks",
    "The scrub checks all weights within 64 syncs and names what changed; a full sync repairs it.",
)
@pytest.mark.promise("What operators see", "What the scrub finds is reported.")
@pytest.mark.parametrize("every", [3, 64])
@pytest.mark.parametrize(("name", "position"), [("a", 9), ("c", 0), ("d", 24)])
def test_what_a_scrub_finds_between_syncs_is_named_at_both_ends(
    every: int, name: str, position: int
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (10,), "b": (0,), "c": (), "d": (5, 5), "step": (1,)}
    source, engine = (Model({n: torch.zeros(s) for n, s in shapes.items()}) for _ in range(2))
    options, events = ReceiverOptions(scrub_every=every, stall_timeout_s=60), list[SyncEvent]()
    with subscribe(events.append), joined(source, engine, receiving=options) as here:
        serving, told, full_synced = here.serving["engine/0"], "", 0
        engine.get_parameter(name).data.view(-1)[position] = -0.0
        for _ in range(every + 1):  # one may be over before the last one's scrub
            source.get_parameter("step").data += 1
            if not serving.errors:
                try:
                    stats = here.sender.send_weights(timeout_s=60)
                except (SyncAborted, NoReceivers) as error:  # it left within that, or before it
                    told += str(error)
                else:
                    told += "".join(stats.lost.values())
                    full_synced += stats.full_synced
        until(lambda: bool(serving.errors))
        stats = recovers(here)
        told += "".join(stats.lost.values())
        assert full_synced + stats.full_synced == 1
        assert bits_equal(source, engine)
        assert f"DirtyReceiver: {name}: weights changed" in told
        assert isinstance(serving.errors[0], DirtyReceiver)
        until(lambda: any(isinstance(one, ReceiveStats) and one.was_dirty for one in events))
    failures = [one for one in events if isinstance(one, SyncFailed) and one.corrupted]
    assert [(one.corrupted, one.is_dirty) for one in failures] == [(name, True)]


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
