"""Who calls beside a call under way is refused, and no interrupt leaves torch in another mode."""

from __future__ import annotations

import contextlib
import selectors
import sys
import threading

import pytest
import torch

from deltasync import ModuleSource, ModuleTarget, WeightReceiver, WeightSender
from deltasync.errors import CallOrderError
from deltasync.transports import inprocess
from tests.sync.interrupted import Sending, change
from tests.sync.interrupts import Strike, Struck, Tracer
from tests.worlds.links import Serving, bits_equal, random_model, until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.timeout(300)
def test_threads_that_call_a_sender_beside_its_own_do_not_disturb_it() -> None:
    """However they alternate: the code that runs a sync may be a generator, now and then."""
    shapes = {f"p{number}": (64,) for number in range(100)} | {"a": (64,)}
    source, replica, link = random_model(shapes, 0), random_model(shapes, 1), inprocess.Sender()
    sender, wrong, stop = WeightSender(ModuleSource(source), link), list[object](), False
    serving = Serving(WeightReceiver(ModuleTarget(replica), link.receiver())).start()

    def meddle() -> None:
        while not stop:
            try:
                sender.refresh_source()
            except CallOrderError:
                pass
            except ValueError as error:
                wrong.append(error)

    sender.wait_for_receivers(1)
    sender.send_weights()
    threads = [threading.Thread(target=meddle) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(500):
            change(source)
            try:
                wrong += sender.send_weights().lost.items()
            except CallOrderError:
                continue
            except ValueError as error:
                wrong.append(error)
    finally:
        stop = True
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not wrong
    sender.send_weights()
    until(lambda: bits_equal(source, replica))
    serving.stop()
    sender.close()


@pytest.mark.parametrize("visit", [1, 3, 5])
def test_no_interrupt_of_a_context_leaves_the_caller_without_gradients(visit: int) -> None:
    """Where contexts begin and end, CPython looks for signals in code of `contextlib`."""
    world, tracer = Sending(1), Tracer(opcodes=True)
    with contextlib.closing(world):
        world.prepare()
        tracer.places(world.act)
        places = [place for place in tracer.hits if place[0].co_filename == contextlib.__file__]
        assert len(places) > 20
        for place in places[::3]:
            world.prepare()
            with contextlib.suppress(Struck):
                tracer.strike(world.act, Strike(place, min(visit, tracer.hits[place])))
            assert torch.is_grad_enabled(), place
            assert not torch.is_inference_mode_enabled(), place
        world.calm()


def test_a_link_goes_on_that_was_interrupted_as_it_was_put_in_order() -> None:
    """Also in code of `selectors`, which then knows of other sockets than the system does."""
    world, tracer = Sending(1, link="shared_memory"), Tracer()
    with contextlib.closing(world):
        tracer.include(selectors.__file__)
        world.prepare()
        tracer.places(world.act)
        [first] = [place for place in tracer.hits if place[0].co_name == "_run"][:1]

        def interrupted() -> None:
            world.prepare()
            with pytest.raises(Struck):
                tracer.strike(world.act, Strike(first))

        interrupted()
        tracer.places(world.act)
        places = [p for p in tracer.hits if p[0].co_filename == selectors.__file__]
        for place in places:
            for visit in {1, tracer.hits[place]}:
                interrupted()
                with contextlib.suppress(Struck):
                    tracer.strike(world.act, Strike(place, visit))
                world.calm()
