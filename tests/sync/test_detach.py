"""An engine that sleeps: nothing looks at its weights, nobody waits for it, little is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltasync import ReceiverOptions
from deltasync.sync.protocol.receiver_session import ReceiverState
from tests.sync import asleep
from tests.worlds.engines import model, staging_engine
from tests.worlds.links import bits_equal, fleet, until
from tests.worlds.programs import run

OPTIONS = ReceiverOptions(stall_timeout_s=2)


@pytest.mark.promise("Checks", "Between `detach` and `attach` nothing reads or writes the weights.")
def test_nothing_looks_at_weights_that_were_released() -> None:
    """They cannot be read while the engine sleeps; a trainer sends all the time."""
    done = run(Path(asleep.__file__))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("moved", [False, True])
def test_weights_that_were_lost_or_moved_come_back_by_a_full_sync(moved: bool) -> None:
    with staging_engine(OPTIONS) as (here, staging):
        here.join(staging)
        here.receiver.detach()
        weights = here.replica.get_parameter("a")
        if moved:
            weights.data = weights.data.clone()
        weights.data.zero_()
        here.receiver.attach()
        for _ in range(3):  # a sync that begins at once fails, and the next one heals
            sent = here.send_step()
            while not sent.done():
                if staging.wait_staged(timeout_s=0.05):
                    staging.commit()
        assert sent.result().receivers == 1
        assert bits_equal(here.source, here.replica)
        here.receiver.check_serving()


def test_an_engine_that_sleeps_does_not_keep_another_from_the_weights() -> None:
    source, sleeper, other = (model(seed) for seed in range(3))
    with fleet(source) as here:
        here.join({"sleeper": sleeper, "other": other})
        receiver = here.serving["sleeper/0"].receiver
        until(lambda: receiver.state is ReceiverState.READY)
        receiver.detach()
        source.get_parameter("a").data += 1
        stats = here.sender.send_weights(timeout_s=60)
        assert (stats.receivers, list(stats.lost)) == (1, ["sleeper[0/1]"])
        assert bits_equal(source, other)
        receiver.attach()
        here.wait(2)
        assert here.sender.send_weights(timeout_s=60).receivers == 2
        assert bits_equal(source, sleeper)
