"""A version whose digests are all accepted is a success, whoever leaves afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from deltasync import ModuleTarget, WeightReceiver
from deltasync.transports.base import ReceiveTransport
from tests.worlds.links import LINKS, bits_equal, fleet, random_model

STEPS = 3


def serve(link: ReceiveTransport, engine: nn.Module) -> list[int]:
    with WeightReceiver(ModuleTarget(engine), link) as receiver:
        return [receiver.receive_weights() for _ in range(STEPS)]


@pytest.mark.promise(
    "All or nothing",
    "A receiver that leaves after its digest was accepted fails no sync.",
)
@pytest.mark.parametrize("link", LINKS)
def test_a_receiver_that_closes_after_its_last_sync_fails_no_step(link: str) -> None:
    """As the guide's examples do, a few times."""
    for _ in range(3):
        trainer, engine = (random_model({"w": (64, 64)}, seed) for seed in (0, 1))
        with fleet(trainer, link=LINKS[link]) as here, ThreadPoolExecutor(1) as threads:
            serving = threads.submit(serve, here.transport.receiver(), engine)
            here.wait(1)
            for _ in range(STEPS):
                trainer.get_parameter("w").data += 1
                stats = here.sender.send_weights()
                assert (stats.receivers, stats.lost) == (1, {})
            assert serving.result(60) == [1, 2, 3]
            assert bits_equal(trainer, engine)
