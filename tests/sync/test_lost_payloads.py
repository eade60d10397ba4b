"""Payloads that are lost with a receiver: over gloo they travel from one to the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event

import pytest
import torch

from deltasync import (
    DeltaSyncError,
    ModuleSource,
    ReceiverOptions,
    SenderOptions,
    WeightSender,
)
from deltasync.errors import ConfigError, PeerLost
from deltasync.sync.protocol.receiver_session import DETACHED, INCOMPLETE
from deltasync.transports import collective
from deltasync.wire.messages import Failed, Prepare
from tests.worlds.links import Model, Receivers, Serving, bits_equal, random_model, step
from tests.worlds.trainers import rows_of, trainer_of

pytestmark = pytest.mark.timeout(300)  # gloo forms groups anew

SHAPES = {"a": (64, 1024), "b": (33,), "c": (64, 512)}
NAMES = ("0", "1", "2")
OPTIONS = SenderOptions(bucket_bytes=100_000)
STAGED, IN_PLACE = (
    ReceiverOptions(stall_timeout_s=20),
    ReceiverOptions(stall_timeout_s=20, max_staged_bytes=0),
)


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
                self._dispose()
                raise PeerLost("planted")
        super()._on_start(data)


class Link(collective.Sender):
    def receiver(self) -> End:
        return End(*self.address)


class Gloo(Receivers):
    """A sender and three receivers, whose models are those of `held`."""

    def __init__(self, source: Model, options: ReceiverOptions) -> None:
        super().__init__([Link()])
        self.source = source
        self.sender = WeightSender(ModuleSource(source), self.links[0], options=OPTIONS)
        self.held = {name: random_model(SHAPES, 1 + int(name)) for name in NAMES}
        for name, module in self.held.items():
            self.add(module, engine=name, options=options)
        self.wait(len(NAMES))

    def step(self) -> None:
        step(self.source, torch.Generator().manual_seed(1), 0.6)

    def of(self, name: str) -> Serving:
        return self.serving[f"{name}/0"]

    def end(self, name: str, lane: int = 0) -> End:
        end = self.of(name).receiver._links._links[lane]
        assert isinstance(end, End)
        return end

    def check(self, *names: str) -> None:
        """These have the version, and did nothing wrong."""
        for name in names:
            assert bits_equal(self.source, self.held[name])
            assert (self.of(name).errors, self.of(name).receiver.is_dirty) == ([], False)


@contextmanager
def gloo(options: ReceiverOptions = STAGED) -> Iterator[Gloo]:
    here = Gloo(random_model(SHAPES, 0), options)
    try:
        yield here
    finally:
        here.close()


def others(name: str) -> list[str]:
    return [one for one in NAMES if one != name]


def lie(serving: Serving, error: str) -> None:
    """Answer every `prepare` with an error, and go on."""
    receiver = serving.receiver

    def answer(prepare: Prepare) -> None:
        receiver._reply(Failed(version=prepare.version, error=error, reason="a lie"))

    receiver._prepared = answer  # type: ignore[method-assign]


@pytest.mark.parametrize("payload", [1, 2, 4])
@pytest.mark.parametrize("dies", NAMES)
def test_who_misses_a_payload_has_the_version_after_the_next_attempt(
    dies: str, payload: int
) -> None:
    with gloo() as here:
        here.sender.send_weights(timeout_s=20)
        here.step()
        here.end(dies).dies_at = payload
        stats = here.sender.send_weights(timeout_s=20)
        assert (stats.receivers, list(stats.lost)) == (2, [f"{dies}[0/1]"])
        assert stats.num_buckets == 4
        here.check(*others(dies))


@pytest.mark.parametrize("hangs", NAMES)
def test_who_is_behind_one_that_hangs_has_the_version(hangs: str) -> None:
    goes_on = Event()
    with gloo() as here:
        here.sender.send_weights(timeout_s=20)
        here.step()
        here.end(hangs).hangs = goes_on
        here.end(hangs).dies_at = 4
        stats = here.sender.send_weights(timeout_s=8)
        assert (stats.receivers, list(stats.lost)) == (2, [f"{hangs}[0/1]"])
        here.check(*others(hangs))
        goes_on.set()


def test_what_comes_after_a_lost_payload_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has been read already when the payload is given up, and nothing else comes."""
    abandon = collective.Receiver._on_abandon

    def slow(receiver: collective.Receiver, data: bytes) -> None:
        is_flying = receiver._is_flying
        abandon(receiver, data)
        if is_flying:
            time.sleep(0.3)

    monkeypatch.setattr(collective.Receiver, "_on_abandon", slow)
    for dies in NAMES:
        with gloo() as here:
            here.sender.send_weights(timeout_s=20)
            here.step()
            here.end(dies).dies_at = 2
            stats = here.sender.send_weights(timeout_s=20)
            assert (stats.receivers, list(stats.lost)) == (2, [f"{dies}[0/1]"])
            here.check(*others(dies))


@pytest.mark.parametrize("dies", NAMES)
def test_a_rank_of_the_trainer_tells_of_a_loss_when_it_has_sent_all(dies: str) -> None:
    source = random_model(SHAPES, 0)
    with trainer_of(source, rows_of(source, 2), options=OPTIONS, link=Link) as here:
        held = {name: random_model(SHAPES, 1 + int(name)) for name in NAMES}
        for name, module in held.items():
            here.add(module, engine=name, options=STAGED)
        here.settle(3)
        for serving in here.serving.values():
            serving.errors.clear()  # of joining
        step(source, torch.Generator().manual_seed(1), 0.6)
        here.step()
        end = here.serving[f"{dies}/0"].receiver._links._links[1]
        assert isinstance(end, End)
        end.dies_at = 2  # the last one of the second rank
        stats = here.send(timeout_s=20)
        assert (stats.receivers, list(stats.lost)) == (2, [f"{dies}[0/1]"])
        assert stats.num_buckets == 4
        for name in others(dies):
            assert bits_equal(source, held[name])
            assert here.serving[f"{name}/0"].errors == []


@pytest.mark.parametrize("options", [STAGED, IN_PLACE], ids=["staged", "in place"])
def test_who_says_falsely_that_it_misses_a_payload_is_alone_in_that(
    options: ReceiverOptions,
) -> None:
    with gloo(options) as here:
        here.sender.send_weights(timeout_s=20)
        here.step()
        lie(here.of("1"), INCOMPLETE)
        stats = here.sender.send_weights(timeout_s=20)
        assert (stats.attempts, stats.lost) == (1, {"1[0/1]": "Incomplete: a lie"})
        here.check("0", "2")


@pytest.mark.parametrize(
    ("options", "attempts"), [(STAGED, 2), (IN_PLACE, 1)], ids=["staged", "in place"]
)
def test_no_other_attempt_is_made_where_those_that_have_all_could_not_take_it_back(
    options: ReceiverOptions, attempts: int
) -> None:
    with gloo(options) as here:
        here.sender.send_weights(timeout_s=20)
        here.step()
        lie(here.of("1"), INCOMPLETE)
        lie(here.of("2"), "TargetMoved")
        stats = here.sender.send_weights(timeout_s=20)
        assert (stats.attempts, stats.receivers) == (attempts, 1)
        assert set(stats.lost) == {"1[0/1]", "2[0/1]"}
        here.check("0")


@pytest.mark.parametrize("said", [(DETACHED, INCOMPLETE), (DETACHED, DETACHED)])
def test_no_answers_make_a_full_sync_go_on_for_ever(said: tuple[str, str]) -> None:
    with gloo() as here:
        for name, error in zip(("0", "1"), said, strict=True):
            lie(here.of(name), error)
        with suppress(DeltaSyncError):
            here.sender.send_weights(timeout_s=20)
        assert bits_equal(here.source, here.held["2"])


def test_a_liar_does_not_cost_a_sleeping_receiver_its_membership() -> None:
    with gloo() as here:
        here.sender.send_weights(timeout_s=20)
        here.step()
        for name in ("0", "2"):
            here.of(name).receiver.detach()
        lie(here.of("1"), INCOMPLETE)
        with pytest.raises(ConfigError, match="no weights were sent"):
            here.sender.send_weights(timeout_s=20)
        for name in ("0", "2"):
            here.of(name).receiver.attach()
        here.sender.send_weights(timeout_s=20)
        here.check("0", "2")


def test_a_source_that_may_change_is_not_sent_again() -> None:
    with gloo() as here:
        here.sender.send_weights(timeout_s=20)
        here.step()
        here.sender.refresh_source()
        lie(here.of("1"), INCOMPLETE)
        lie(here.of("2"), "TargetMoved")
        stats = here.sender.send_weights(timeout_s=20, on_source_read=lambda: None)
        assert (stats.attempts, stats.receivers) == (1, 1)
        here.check("0")
