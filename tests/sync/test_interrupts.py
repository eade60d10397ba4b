"""An interrupt anywhere, or two of them, leaves both ends able to go on with the next call.

`tests.sync.interrupts` strikes at every place; here are some of them in each world, always the same
ones of a version of the code, and nearly all lines with `HYPOTHESIS_PROFILE=nightly`.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import settings

from deltasync import subscribe
from deltasync.errors import ConfigError, DeltaSyncError, SyncAborted
from tests.sync.interrupted import WORLDS, Sending, change
from tests.sync.interrupts import Figures, Strike, Struck, Tracer, endure, places_of, strikes_at

pytestmark = [
    # An interrupt between a descriptor and the line after leaves it to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_STRIKES = max(6, settings().max_examples // 40)
_MORE = dict.fromkeys(["send: joins", "receive", "stage"], 5)


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
    tracer, figures, make = Tracer(), Figures(), WORLDS[name]
    strikes = strikes_at(places_of(make, tracer), seed=0)[: _STRIKES * _MORE.get(name, 1)]
    if others:
        strikes = of_all_kinds(strikes_at(places_of(make, tracer), seed=1)[: 2 * _STRIKES])
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
        assert here.sender.send_weights(timeout_s=60).version == version + 1
        assert len(refused) == len(calls)
        here.calm()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_exception_that_another_thread_plants_is_like_an_interrupt(here: Sending) -> None:
    ended, began = list[BaseException](), threading.Event()

    def send() -> None:
        try:
            while True:
                change(here.source)
                here.sender.send_weights(timeout_s=60)
                began.set()
        except BaseException as error:
            ended.append(error)
            if not isinstance(error, Struck):
                raise

    for _ in range(10):
        began.clear()
        thread = threading.Thread(target=send)
        thread.start()
        assert began.wait(30)
        assert thread.ident is not None
        planted = ctypes.c_ulong(thread.ident), ctypes.py_object(Struck)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(*planted) == 1
        thread.join(30)
        assert not thread.is_alive()
        here.calm()
    assert [type(error) for error in ended] == [Struck] * 10


def test_what_a_callback_raises_ends_its_call_alone(here: Sending) -> None:
    for raised in (ValueError, KeyboardInterrupt, GeneratorExit, DeltaSyncError):

        def fail(raised: type[BaseException] = raised) -> None:
            here.on_phase = lambda: None
            raise raised("planted")

        here.on_phase = fail
        change(here.source)
        with pytest.raises(raised, match="planted"):
            here.sender.send_weights(timeout_s=60)
        here.calm()
        change(here.source)
        with pytest.raises(raised, match="planted"):
            here.sender.send_weights(timeout_s=60, on_source_read=fail)
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
            here.sender.send_weights(timeout_s=60)
        with subscribe(told.append):
            stats = here.sender.send_weights(timeout_s=60)
        assert stats in told
        assert stats.receivers == 1
        assert stats.lost == {"e0[0/1]": "a call was interrupted: it rejoins"}
        here.check()
