"""Who calls beside a call under way is refused, and no interrupt leaves torch in another mode."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deltasync.errors import CallOrderError
from tests.sync.interrupted import Sending, change
from tests.sync.interrupts import Strike, Struck, Tracer
from tests.worlds.links import bits_equal, fleet, random_model, until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.timeout(300)
def test_threads_that_call_a_sender_beside_its_own_do_not_disturb_it() -> None:
    """However they alternate: the code that runs a sync may be a generator, now and then."""
    shapes = {f"p{number}": (64,) for number in range(100)} | {"a": (64,)}
    source, replica = random_model(shapes, 0), random_model(shapes, 1)
    wrong, stop, before = list[object](), threading.Event(), sys.getswitchinterval()

    def calls(call: Callable[[], object]) -> None:
        try:
            call()
        except CallOrderError:
            pass
        except ValueError as error:
            wrong.append(error)

    def meddle() -> None:
        while not stop.is_set():
            calls(here.sender.refresh_source)

    with fleet(source) as here, ThreadPoolExecutor(2) as threads:
        here.join(replica)
        sys.setswitchinterval(1e-6)
        try:
            meddling = [threads.submit(meddle) for _ in range(2)]
            for _ in range(60):
                change(source)
                calls(lambda: wrong.extend(here.sender.send_weights().lost))
        finally:
            stop.set()
            sys.setswitchinterval(before)
        for one in meddling:
            one.result(60)
        assert not wrong
        here.sender.send_weights()
        until(lambda: bits_equal(source, replica))


def test_no_interrupt_of_a_context_leaves_the_caller_without_gradients() -> None:
    """Where contexts begin and end, CPython looks for signals in code of `contextlib`."""
    world, tracer = Sending(1), Tracer(opcodes=True)
    with contextlib.closing(world):
        world.prepare()
        tracer.places(world.act)
        places = [place for place in tracer.hits if place[0].co_filename == contextlib.__file__]
        assert len(places) > 20
        for number, place in enumerate(places[::4]):
            visit = (1, 3, 5)[number % 3]
            world.prepare()
            with contextlib.suppress(Struck):
                tracer.strike(world.act, Strike(place, min(visit, tracer.hits[place])))
            assert torch.is_grad_enabled(), place
            assert not torch.is_inference_mode_enabled(), place
        world.calm()
