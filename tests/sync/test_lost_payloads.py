"""Payloads that are lost with a receiver: over gloo they travel from one to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch

from deltasync import DeltaSyncError, ReceiverOptions, SenderOptions
from deltasync.errors import PeerLost
from deltasync.sync.protocol.receiver_session import DETACHED, INCOMPLETE
from deltasync.transports import collective
from deltasync.transports.base import ReceiveTransport
from deltasync.wire.frame import decode, encode
from deltasync.wire.messages import Failed, Prepared
from tests.worlds.links import (
    Receivers,
    Serving,
    ThroughReceiver,
    bits_equal,
    fleet,
    random_model,
    step,
)
from tests.worlds.trainers import rows_of, trainer_of

pytestmark = pytest.mark.timeout(300)  # gloo forms groups anew

SHAPES = {"a": (64, 1024), "b": (33,), "c": (64, 512)}
NAMES = ("0", "1", "2")
OPTIONS = SenderOptions(bucket_bytes=120_000)
STAGED = ReceiverOptions(stall_timeout_s=60)


class End(collective.Receiver):
    """A receiver that has been ready for a payload, and passes it on to nobody.

    Attributes:
        dies_at: The payload, from 1 on; 0 for none.
        hangs: Waits for this while its connection stays open, before it dies.
    """

    dies_at = 0
    hangs: Event | None = None

    def _on_start(self, data: bytes) -> None:
        if self.dies_at and self._announced is not None:
            self.dies_at -= 1
            if self.dies_at == 0:
                if self.hangs is not None:
                    self.hangs.wait(60)
                self._forget()
                raise PeerLost("planted")
        super()._on_start(data)


class Link(collective.Sender):
    def receiver(self) -> End:
        return End(*self.address)


class Three:
    """Three engines of a trainer, and their links to each of its ranks."""

    def __init__(self, here: Receivers, source: Any) -> None:
        self.here, self.source = here, source
        self.held = {name: random_model(SHAPES, 1 + int(name)) for name in NAMES}
        self.links: dict[str, list[ThroughReceiver]] = {}
        for name, module in self.held.items():
            links = self.links[name] = list[ThroughReceiver]()

            def kept(link: ReceiveTransport, links: list[ThroughReceiver] = links) -> Any:
                links.append(ThroughReceiver(link))
                return links[-1]

            here.add(module, engine=name, options=STAGED, wrap=kept)
        here.wait(len(NAMES))
        self.order = list(NAMES)  # in which payloads travel
        self._random = torch.Generator().manual_seed(1)

    def step(self) -> None:
        step(self.source, self._random, 0.6)

    def at(self, place: int) -> str:
        """The one that stands there. It is to be lost, and rejoins at the end."""
        name = self.order.pop(place)
        self.order.append(name)
        return name

    def of(self, name: str) -> Serving:
        return self.here.serving[f"{name}/0"]

    def end(self, name: str, lane: int = 0) -> End:
        end = self.links[name][lane]._inner
        assert isinstance(end, End)
        return end

    def send(self, *, timeout_s: float = 60, **settings: Any) -> Any:
        return self.here.sender.send_weights(timeout_s=timeout_s, **settings)

    def check(self, names: Sequence[str] = NAMES) -> None:
        """These have the version, and did nothing wrong."""
        for name in names:
            assert bits_equal(self.source, self.held[name])
            assert (self.of(name).errors, self.of(name).receiver.is_dirty) == ([], False)


@contextmanager
def three() -> Iterator[Three]:
    """Three members, and a step that was not sent."""
    source = random_model(SHAPES, 0)
    with fleet(source, options=OPTIONS, link=Link) as here:
        found = Three(here, source)
        found.send()
        found.step()
        yield found


def others(name: str) -> list[str]:
    return [one for one in NAMES if one != name]


def lose(here: Three, dies: str, send: Callable[[], Any]) -> None:
    """One receiver is lost within a sync, and rejoins; the others have the version."""
    stats = send()
    assert (stats.receivers, list(stats.lost)) == (2, [f"{dies}[0/1]"])
    assert stats.num_buckets == 4
    here.check(others(dies))
    here.of(dies).errors.clear()
    here.here.wait(3)


@pytest.mark.parametrize("is_slow", [False, True], ids=["quick", "slow"])
def test_who_misses_a_payload_has_the_version_after_the_next_attempt(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what comes next was read already as the payload is given up: it is not waited for."""
    abandon = collective.Receiver._on_abandon

    def slow(receiver: collective.Receiver, data: bytes) -> None:
        is_flying = receiver._is_flying
        abandon(receiver, data)
        if is_flying and is_slow:
            time.sleep(0.3)

    monkeypatch.setattr(collective.Receiver, "_on_abandon", slow)
    with three() as here:
        for place in range(3):
            for payload in (2,) if is_slow else (1, 2, 4):
                dies = here.at(place)
                here.end(dies).dies_at = payload
                lose(here, dies, here.send)
                here.send()
                here.check()
                here.step()


def test_who_is_behind_one_that_hangs_has_the_version() -> None:
    goes_on, hangs = Event(), "0"
    with three() as here:
        here.end(hangs).hangs = goes_on
        here.end(hangs).dies_at = 4
        stats = here.send(timeout_s=5)
        assert (stats.receivers, list(stats.lost)) == (2, [f"{hangs}[0/1]"])
        here.check(others(hangs))
        goes_on.set()


def test_a_rank_of_the_trainer_tells_of_a_loss_when_it_has_sent_all() -> None:
    source = random_model(SHAPES, 0)
    with trainer_of(source, rows_of(source, 2), options=OPTIONS, link=Link) as trainer:
        here = Three(trainer, source)
        for place in range(3):
            trainer.settle(3)
            dies = here.at(place)
            for name in NAMES:
                here.of(name).errors.clear()  # of joining
            here.step()
            trainer.step()
            here.end(dies, lane=1).dies_at = 2  # the last one of the second rank
            lose(here, dies, trainer.send)


@pytest.mark.parametrize("error", [INCOMPLETE, DETACHED])
def test_no_answers_make_a_full_sync_go_on_for_ever(error: str) -> None:
    source = random_model(SHAPES, 0)
    with fleet(source, options=OPTIONS, link=Link) as fleet_:
        here = Three(fleet_, source)
        for name, lie in (("0", DETACHED), ("1", error)):
            link: Any = here.links[name][0]
            link.reply = partial(lying, link.reply, lie)
        with suppress(DeltaSyncError):
            here.send()
        assert bits_equal(source, here.held["2"])


def lying(reply: Callable[..., None], error: str, data: bytes, *, timeout_s: float) -> None:
    """Answer every `prepare` with an error."""
    message = decode(data)[0]
    if isinstance(message, Prepared):
        data = encode(Failed(version=message.version, error=error, reason="a lie"))
    reply(data, timeout_s=timeout_s)
