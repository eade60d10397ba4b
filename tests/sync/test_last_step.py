"""A version whose digests are all accepted is a success, whoever leaves afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from deltasync import ModuleTarget, WeightReceiver, sync_after_step
from tests.worlds.links import (
    LINKS,
    Fleet,
    Linking,
    fleet,
)

STEPS = 3


@pytest.mark.promise(
    "All or nothing",
    "A receiver that leaves after its digest was accepted fails no sync.",
)
@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_a_receiver_that_closes_after_its_last_sync_fails_no_step(
    link: Callable[[], Linking],
) -> None:
    """As the guide's examples do, a few times."""
    for _ in range(3):
        trainer, engine = nn.Linear(64, 64), nn.Linear(64, 64)
        with fleet(trainer, link=link) as here, ThreadPoolExecutor(1) as threads:

            def serve(here: Fleet = here, engine: nn.Module = engine) -> list[int]:
                with WeightReceiver(ModuleTarget(engine), here.transport.receiver()) as receiver:
                    return [receiver.receive_weights() for _ in range(STEPS)]

            serving = threads.submit(serve)
            here.sender.wait_for_receivers(1, timeout_s=60)
            optimizer = torch.optim.AdamW(trainer.parameters())
            hook = sync_after_step(optimizer, here.sender, on_error="raise")
            for _ in range(STEPS):
                trainer(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
            assert serving.result(60) == [1, 2, 3]
            assert hook.last_stats is not None
            assert (hook.syncs, hook.last_stats.receivers, hook.last_stats.lost) == (STEPS, 1, {})
            assert torch.equal(trainer.weight, engine.weight)
