"""Who calls beside a call under way is refused, and no interrupt leaves torch in another mode."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltasync.errors import CallOrderError
from tests.sync.interrupted import change
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
