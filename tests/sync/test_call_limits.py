"""What a call may take in all, what it does about lost receivers, and options set later."""

from __future__ import annotations

import time

import pytest

from deltasync import (
    ReceiverOptions,
)
from deltasync.errors import (
    SyncAborted,
    TransportError,
    TransportTimeout,
)
from deltasync.transports.base import ReceiveTransport
from tests.worlds.links import (
    Fleet,
    Model,
    ThroughReceiver,
    ThroughSender,
    bits_equal,
    fleet,
    random_model,
    until,
)
from tests.worlds.trainers import rows_of, trainer_of

SHAPES = {"a": (8, 4), "b": (6,)}


class Slow(ThroughReceiver):
    """A link on which each answer takes `delay_s`."""

    delay_s = 0.0

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        time.sleep(self.delay_s)
        super().reply(data, timeout_s=timeout_s)


class Overtime(ThroughSender):
    """A link on which answers are there when their time is over."""

    is_slow = False

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        replies = super().collect_replies(timeout_s=timeout_s)
        if self.is_slow:
            time.sleep(timeout_s)
        return replies


def nudge(source: Model) -> None:
    source.get_parameter("a").data += 1


def joined(here: Fleet, *engines: str) -> tuple[list[Model], list[Slow]]:
    """Members of these names, and their links."""
    links = list[Slow]()

    def slow(link: ReceiveTransport) -> Slow:
        links.append(Slow(link))
        return links[-1]

    replicas = {name: random_model(SHAPES, 1 + n) for n, name in enumerate(engines)}
    here.join(replicas, wrap=slow)
    return list(replicas.values()), links


@pytest.mark.parametrize("decided", [False, True], ids=["before the decision", "after it"])
def test_a_receiver_that_answers_slowly_each_time_cannot_exceed_the_total(decided: bool) -> None:
    """Whoever answers in time stays a member."""
    source, names = random_model(SHAPES, 0), ["slow"] if decided else ["slow", "quick"]
    with fleet(source) as here:
        replicas, links = joined(here, *names)
        version = here.sender.version
        nudge(source)
        links[0].delay_s = 0.5
        began = time.monotonic()
        with pytest.raises(TransportTimeout, match="total_timeout_s has passed"):
            here.sender.send_weights(timeout_s=60, total_timeout_s=0.8 if decided else 0.3)
        assert time.monotonic() - began < 4
        assert here.sender.version == version + decided
        assert here.sender.engines == set(names[1:])
        links[0].delay_s = 0.0
        here.wait(len(names))
        assert here.sender.send_weights(timeout_s=60).receivers == len(names)
        assert all(bits_equal(source, replica) for replica in replicas)


@pytest.mark.parametrize("max_staged_bytes", [None, 0], ids=["staged", "in place"])
def test_nothing_is_decided_once_the_time_for_the_call_has_passed(
    max_staged_bytes: int | None,
) -> None:
    source, replica = random_model(SHAPES, 0), random_model(SHAPES, 1)
    options = ReceiverOptions(max_staged_bytes=max_staged_bytes)
    with fleet(source, wrap=Overtime) as here:
        version = here.join(replica, options=options).version
        with pytest.raises(TransportTimeout, match="before a version was decided"):
            here.sender.send_weights(total_timeout_s=0)
        assert (here.sender.version, here.sender.num_receivers) == (version, 1)
        nudge(source)
        here.link.is_slow = True
        with pytest.raises(TransportTimeout, match="total_timeout_s has passed"):
            here.sender.send_weights(timeout_s=60, total_timeout_s=1)
        assert here.sender.version == version
        here.link.is_slow = False
        if max_staged_bytes is not None:  # it has written something: it leaves, and rejoins
            until(lambda: bool(here.serving["engine/0"].errors))
        here.wait(1)
        assert here.sender.send_weights(timeout_s=60).version == version + 1
        assert bits_equal(source, replica)


def test_ranks_of_a_trainer_have_a_total_too() -> None:
    model = random_model(SHAPES, 0)
    with trainer_of(model, rows_of(model, 2)) as trainer:
        with pytest.raises(SyncAborted, match=r"rank 1 of the trainer did not come in 0\.\d+ s"):
            trainer.sender.send_weights(timeout_s=60, total_timeout_s=0.2)
        began = time.monotonic()
        with pytest.raises(SyncAborted, match="rank 0 of the trainer says nothing"):
            trainer.ranks[1].send_weights(timeout_s=60, total_timeout_s=0.2)
        assert time.monotonic() - began < 2
