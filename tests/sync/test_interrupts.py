"""An interrupt anywhere, or two of them, leaves both ends able to go on with the next call.

`tests.sync.interrupts` strikes at every place; here are some of them in each world, always the same
ones of a version of the code.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable

import pytest

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.errors import ConfigError, DeltaSyncError, SyncAborted
from deltasync.sync.protocol.round import SyncPhase
from deltasync.transports import inprocess
from tests.sync.interrupted import SHAPES, WORLDS, Sending, change, retried
from tests.sync.interrupts import (
    Figures,
    Strike,
    Struck,
    Tracer,
    World,
    endure,
    places_of,
    strikes_at,
)
from tests.worlds.links import Serving, bits_equal, random_model, until

pytestmark = [
    # An interrupt between a descriptor and the line after leaves it to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_STRIKES = 8


class Alarmed(TimeoutError):
    """What a handler of SIGALRM may raise; the system raises errors of its base class, too."""


@pytest.mark.promise(
    "All or nothing",
    "An interrupt at any moment of any call, or a second one while it is cleaned up after, "
    "leaves both ends able to go on with the next call.",
)
@pytest.mark.parametrize("name", WORLDS)
def test_both_ends_go_on_after_interrupts(name: str) -> None:
    check(WORLDS[name], lambda strikes: strikes[:_STRIKES])


class Preempted(SyncAborted):
    """What the handler of a user who knows deltasync may raise."""


_KINDS = [Alarmed, ValueError, Preempted, GeneratorExit, SystemExit]


@pytest.mark.promise(
    "All or nothing",
    "An interrupt at any moment of any call, or a second one while it is cleaned up after, "
    "leaves both ends able to go on with the next call.",
)
@pytest.mark.parametrize("kind", _KINDS)
def test_whatever_a_signal_handler_raises_is_like_an_interrupt(kind: type[BaseException]) -> None:
    def of_kind(strikes: list[Strike]) -> list[Strike]:
        return [Strike(s.place, s.hit, s.then, kind) for s in strikes[-_STRIKES:]]

    check(WORLDS["send: shared memory, joins"], of_kind)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["send", "send: joins", "receive", "stage"])
def test_both_ends_go_on_after_an_interrupt_at_any_line(name: str) -> None:
    check(WORLDS[name], lambda strikes: strikes)


def check(make: Callable[[], World], chosen: Callable[[list[Strike]], list[Strike]]) -> None:
    tracer, figures = Tracer(), Figures()
    strikes = chosen(strikes_at(places_of(make, tracer), seed=0))
    endure(make, tracer, strikes, figures)
    assert not figures.failures, "\n".join(figures.failures)
    assert figures.interrupts > len(strikes) // 2  # others no longer came to the place


def test_a_greeting_that_an_interrupt_swallowed_is_made_again() -> None:
    """After it was read from the link, and before anybody has noted it."""
    world = Sending(1, joins=True)
    tracer = Tracer()
    try:
        world.prepare()
        tracer.places(world.act)
        [place] = [
            (code, at)
            for code, at in tracer.hits
            if (code.co_name, at - code.co_firstlineno) == ("_take_in", 1)
        ]
        world.calm()
        world.prepare()
        with pytest.raises(Struck):
            tracer.strike(world.act, Strike(place))
        world.calm()
    finally:
        world.close()


class Calling:
    """A sender and its engine, with something that is done once, as a sync begins."""

    def __init__(self) -> None:
        self.source, self.replica, link = random_model(SHAPES, 0), random_model(SHAPES, 1), None
        link = inprocess.Sender()
        self.within: Callable[[], object] = lambda: None
        self.sender = WeightSender(ModuleSource(self.source), link, on_phase=self._on_phase)
        self._serving = Serving(WeightReceiver(ModuleTarget(self.replica), link.receiver()))
        self._serving.start()
        self.sync()

    def _on_phase(self, phase: SyncPhase) -> None:
        call, self.within = self.within, lambda: None
        call()

    def sync(self) -> None:
        def sent() -> bool:
            change(self.source)
            self.sender.wait_for_receivers(1, timeout_s=10)
            return self.sender.send_weights(timeout_s=10).receivers == 1

        retried(sent)
        until(lambda: bits_equal(self.source, self.replica))

    def close(self) -> None:
        self._serving.stop()
        self.sender.close()


@pytest.mark.parametrize("call", ["send_weights", "refresh_source", "wait", "retain"])
def test_a_signal_handler_that_calls_the_sender_is_refused_and_costs_the_sync_nothing(
    call: str,
) -> None:
    here, refused = Calling(), list[ConfigError]()
    calls: dict[str, Callable[[], object]] = {
        "send_weights": here.sender.send_weights,
        "refresh_source": here.sender.refresh_source,
        "wait": lambda: here.sender.wait_for_receivers(1),
        "retain": lambda: here.sender.retain(["engine"]),
    }

    def handler(*_: object) -> None:
        try:
            calls[call]()
        except ConfigError as error:
            refused.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        here.within = lambda: signal.raise_signal(signal.SIGUSR1)
        change(here.source)
        version = here.sender.version
        assert here.sender.send_weights(timeout_s=10).version == version + 1
        assert "under way" in str(refused[0])
        here.sync()
    finally:
        signal.signal(signal.SIGUSR1, before)
        here.close()


def test_an_exception_that_another_thread_plants_is_like_an_interrupt() -> None:
    here, ended, began = Calling(), list[BaseException](), threading.Event()

    def send() -> None:
        try:
            while True:
                change(here.source)
                here.sender.send_weights(timeout_s=10)
                began.set()
        except BaseException as error:
            ended.append(error)
            if not isinstance(error, Struck):
                raise

    try:
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
            here.sync()
        assert all(isinstance(error, Struck) for error in ended)
        assert len(ended) == 10
    finally:
        here.close()


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, GeneratorExit, DeltaSyncError])
def test_what_a_callback_raises_ends_its_call_alone(raised: type[BaseException]) -> None:
    here = Calling()

    def fail() -> None:
        raise raised("planted")

    try:
        here.within = fail
        change(here.source)
        with pytest.raises(raised, match="planted"):
            here.sender.send_weights(timeout_s=10)
        here.sync()
        change(here.source)
        with pytest.raises(raised, match="planted"):
            here.sender.send_weights(timeout_s=10, on_source_read=fail)
        here.sync()
    finally:
        here.close()


def test_a_call_right_after_an_interrupted_one_succeeds() -> None:
    """It waits until the receivers are back, which takes them a moment."""
    here = Calling()

    def fail() -> None:
        raise KeyboardInterrupt

    try:
        for _ in range(3):
            here.within = fail
            with pytest.raises(KeyboardInterrupt):
                here.sender.send_weights(timeout_s=10)
            stats = here.sender.send_weights(timeout_s=10)
            assert stats.receivers == 1
            assert stats.lost == {"engine[0/1]": "a call was interrupted: it rejoins"}
            until(lambda: bits_equal(here.source, here.replica))
    finally:
        here.close()
