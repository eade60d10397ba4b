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
from deltasync.errors import ConfigError, SyncAborted
from tests.sync.interrupted import WORLDS, Sending, change
from tests.sync.interrupts import Figures, Strike, Struck, Tracer, endure, places_of, strikes_at

pytestmark = [
    # An interrupt between a descriptor and the line after leaves it to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_STRIKES = max(6, settings().max_examples // 40)
_MORE = {"send: joins": 3, "receive": 3, "stage": 3, "send: joins; other kinds": 2}


class Alarmed(TimeoutError):
    """What a handler of SIGALRM may raise; the system raises errors of its base class, too."""


class Preempted(SyncAborted):
    """What the handler of a user who knows deltasync may raise."""


_KINDS = [Alarmed, ValueError, Preempted, GeneratorExit, SystemExit]


@pytest.mark.timeout(1200)  # of all lines
@pytest.mark.promise(
    "All or nothing",
    "An interrupt at any moment of any call, or a second one while it is cleaned up after, "
    "leaves both ends able to go on with the next call.",
)
@pytest.mark.parametrize("name", [*WORLDS, "send: joins; other kinds"])
def test_both_ends_go_on_after_interrupts(name: str) -> None:
    """Whatever a signal handler raises is an interrupt."""
    world, _, others = name.partition(";")
    tracer, figures, make = Tracer(), Figures(), WORLDS[world]
    kinds = cycle(_KINDS if others else [Struck])
    found = strikes_at(places_of(make, tracer), seed=bool(others))
    strikes = [replace(one, kind=next(kinds)) for one in found[: _STRIKES * _MORE.get(name, 1)]]
    endure(make, tracer, strikes, figures)
    assert not figures.failures, "\n".join(figures.failures)
    assert figures.interrupts > len(strikes) // 2  # others no longer came to the place


def test_a_publisher_whose_snapshot_was_advancing_goes_on_with_what_it_has_published() -> None:
    tracer, figures, make = Tracer(), Figures(), WORLDS["publish"]
    places = places_of(make, tracer)
    strikes = [Strike(one) for one in places if one[0].co_qualname.endswith(".decided")]
    assert len(strikes) > 4
    endure(make, tracer, strikes, figures)
    assert not figures.failures, "\n".join(figures.failures)


@pytest.fixture
def here() -> Iterator[Sending]:
    """A sender and its engine."""
    with closing(Sending(1)) as world:
        yield world


def test_a_signal_handler_that_calls_the_sender_is_refused_and_costs_the_sync_nothing(
    here: Sending,
) -> None:
    refused = list[ConfigError]()
    calls: list[Callable[[], object]] = [
        here.sender.send_weights,
        here.sender.refresh_source,
        lambda: here.sender.wait_for_receivers(1),
        lambda: here.sender.let_go_of_strangers(""),
    ]

    def handler(*_: object) -> None:
        here.on_phase = lambda: None
        for call in calls:
            with pytest.raises(ConfigError, match="under way") as error:
                call()
            refused.append(error.value)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        here.on_phase = lambda: signal.raise_signal(signal.SIGUSR1)
        change(here.source)
        version = here.sender.version
        assert here.sender.send_weights(timeout_s=60).version == version + 1
        assert len(refused) == len(calls)
        here.calm()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_call_right_after_an_interrupted_one_succeeds(here: Sending) -> None:
    """It waits until the receivers are back, which takes them a moment."""

    def fail() -> None:
        here.on_phase = lambda: None
        raise KeyboardInterrupt

    told: list[object] = []
    for _ in range(3):
        here.on_phase = fail
        with pytest.raises(KeyboardInterrupt):
            here.sender.send_weights(timeout_s=60)
        with subscribe(told.append):
            stats = here.sender.send_weights(timeout_s=60)
        assert stats in told
        assert stats.receivers == 1
        assert stats.lost == {"e0[0/1]": "a call was interrupted: it rejoins"}
        here.check()
