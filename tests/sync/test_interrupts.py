"""An interrupt anywhere, or two of them, leaves both ends able to go on with the next call.

`tests.sync.interrupts` strikes at every place; here are some of them in each world, always the same
ones of a version of the code, and nearly all lines with `HYPOTHESIS_PROFILE=nightly`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import settings

from deltasync import subscribe
from deltasync.delta.bits import as_bits
from deltasync.delta.host.staging import Staging
from deltasync.errors import ConfigError, DeltaSyncError, DirtyReceiver, SyncAborted
from tests.sync.interrupted import WORLDS, Sending, change
from tests.sync.interrupts import Strike, Tracer, endure, places_of, strikes_at
from tests.worlds.engines import bits_of, engine
from tests.worlds.links import Serving, bits_equal

pytestmark = [
    # An interrupt between a descriptor and the line after leaves it to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_STRIKES = max(6, settings().max_examples // 40)
_MORE = dict.fromkeys(["send: joins", "receive", "stage"], 2)


class Alarmed(TimeoutError):
    """What a handler of SIGALRM may raise; the system raises errors of its base class, too."""


class Preempted(SyncAborted):
    """What the handler of a user who knows deltasync may raise."""


_KINDS = [Alarmed, ValueError, Preempted, GeneratorExit, SystemExit]


def of_all_kinds(strikes: list[Strike]) -> list[Strike]:
    kinds = cycle(_KINDS)
    return [replace(strike, kind=next(kinds)) for strike in strikes]


@pytest.mark.timeout(1200)  # of all lines
@pytest.mark.promise(
    "All or nothing",
    "An interrupt at any moment of any call, or a second one while it is cleaned up after, "
    "leaves both ends able to go on with the next call.",
)
@pytest.mark.parametrize("name", [*WORLDS, "send: shared memory, joins; other kinds"])
def test_both_ends_go_on_after_interrupts(name: str) -> None:
    """Whatever a signal handler raises is an interrupt."""
    name, _, others = name.partition(";")
    tracer, make = Tracer(), WORLDS[name]
    strikes = strikes_at(places_of(make, tracer), seed=0)[: _STRIKES * _MORE.get(name, 1)]
    if others:
        strikes = of_all_kinds(strikes_at(places_of(make, tracer), seed=1)[: 2 * _STRIKES])
    count, failures = endure(make, tracer, strikes)
    assert not failures, "\n".join(failures)
    assert count > len(strikes) // 2  # others no longer came to the place


@pytest.fixture
def here() -> Iterator[Sending]:
    """A sender and its engine."""
    with closing(Sending(1)) as world:
        yield world


def test_a_signal_handler_that_calls_the_sender_is_refused_and_costs_the_sync_nothing(
    here: Sending,
) -> None:
    refused: list[ConfigError] = []
    calls: dict[str, Callable[[], object]] = {
        "send_weights": here.sender.send_weights,
        "refresh_source": here.sender.refresh_source,
        "wait": lambda: here.sender.wait_for_receivers(1),
        "retain": lambda: here.sender.retain(["engine"]),
    }

    def handler(*_: object) -> None:
        here.on_phase = lambda: None
        for call in calls.values():
            with pytest.raises(ConfigError, match="under way") as error:
                call()
            refused.append(error.value)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        here.on_phase = lambda: signal.raise_signal(signal.SIGUSR1)
        change(here.source)
        version = here.sender.version
        assert here.sender.send_weights(timeout_s=10).version == version + 1
        assert len(refused) == len(calls)
        here.calm()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_a_callback_raises_ends_its_call_alone(here: Sending) -> None:
    for raised in (ValueError, KeyboardInterrupt, GeneratorExit, DeltaSyncError):

        def fail(raised: type[BaseException] = raised) -> None:
            here.on_phase = lambda: None
            raise raised("planted")

        here.on_phase = fail
        change(here.source)
        with pytest.raises(raised, match="planted"):
            here.sender.send_weights(timeout_s=10)
        here.calm()
        change(here.source)
        with pytest.raises(raised, match="planted"):
            here.sender.send_weights(timeout_s=10, on_source_read=fail)
        here.calm()


def test_a_call_right_after_an_interrupted_one_succeeds(here: Sending) -> None:
    """It waits until the receivers are back, which takes them a moment."""

    def fail() -> None:
        here.on_phase = lambda: None
        raise KeyboardInterrupt

    told: list[object] = []
    for _ in range(3):
        here.on_phase = fail
        with pytest.raises(KeyboardInterrupt):
            here.sender.send_weights(timeout_s=10)
        with subscribe(told.append):
            stats = here.sender.send_weights(timeout_s=10)
        assert stats in told
        assert stats.receivers == 1
        assert stats.lost == {"e0[0/1]": "a call was interrupted: it rejoins"}
        here.check()


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_commit_is_undone_or_dirty(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the write, and again in the undo: then the weights must not serve."""

    def half(staging: Staging) -> int:
        staging._runs[0].commit()
        raise KeyboardInterrupt

    def interrupted(staging: Staging) -> None:
        raise KeyboardInterrupt

    with engine() as here:
        sent = here.send()
        assert here.receiver.receive_weights(timeout_s=10) == 1
        sent.result(10)
        before = bits_of(here.replica)
        as_bits(here.source.get_parameter("b").data)[3] ^= 1
        sent = here.send_step(timeout_s=5)
        assert here.receiver.stage(timeout_s=10)
        with monkeypatch.context() as patched:
            patched.setattr(Staging, "commit", half)
            if again:
                patched.setattr(Staging, "undo", interrupted)
            with pytest.raises(KeyboardInterrupt):
                here.receiver.commit()
        assert here.receiver.is_dirty == again
        if again:
            with pytest.raises(DirtyReceiver):
                here.receiver.check_serving()
        assert here.holds(before) != again
        healing = Serving(here.receiver).start()
        with pytest.raises(SyncAborted):
            sent.result(10)
        here.send().result(10)
        healing.stop()
        assert bits_equal(here.source, here.replica)
        assert not here.receiver.is_dirty
