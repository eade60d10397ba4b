"""A version whose digests are all accepted is a success, whoever leaves afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from deltasync import ModuleTarget, WeightReceiver, sync_after_step
from deltasync.transports.base import SendTransport
from deltasync.wire.frame import decode
from tests.worlds.links import (
    LINKS,
    Fleet,
    Linking,
    ThroughSender,
    bits_equal,
    fleet,
    random_model,
    step,
    until,
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
            here.sender.wait_for_receivers(1, timeout_s=20)
            optimizer = torch.optim.AdamW(trainer.parameters())
            hook = sync_after_step(optimizer, here.sender, on_error="raise")
            for _ in range(STEPS):
                trainer(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
            assert serving.result(20) == [1, 2, 3]
            assert hook.last_stats is not None
            assert (hook.syncs, hook.last_stats.receivers, hook.last_stats.lost) == (STEPS, 1, {})
            assert torch.equal(trainer.weight, engine.weight)


class Leaving(ThroughSender):
    """A sender's link; does something before `finish` goes out to some peers."""

    def __init__(self, inner: SendTransport, leave: Callable[[Collection[int]], object]) -> None:
        super().__init__(inner)
        self._leave = leave

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        if decode(header)[0].kind == "finish":
            self._leave(peers)
        super().tell(peers, header, timeout_s=timeout_s)


SHAPES = {"a": (40,), "b": (3, 3)}


@pytest.mark.parametrize("world", [1, 2])
def test_who_leaves_after_it_has_committed_has_left_and_the_version_stands(world: int) -> None:
    source = random_model(SHAPES, 0)
    leaving: list[str] = []

    def leave(peers: Collection[int]) -> None:
        members = here.sender._session.participants
        if "engine" in {members[peer].engine for peer in peers}:
            for name in leaving:
                here.serving[name].receiver.close()

    engines = [random_model(SHAPES, 1 + n) for n in range(world + 1)]
    with fleet(source, wrap=lambda inner: Leaving(inner, leave)) as here:
        ranks = [here.add(engine, rank=n, world=world) for n, engine in enumerate(engines[:world])]
        other = here.add(engines[-1], engine="other")
        here.wait(world + 1)
        here.sender.send_weights(timeout_s=5)
        leaving.append("engine/0")
        step(source, torch.Generator().manual_seed(1), 0.2)
        stats = here.sender.send_weights(timeout_s=5)
        assert (stats.version, stats.receivers, stats.lost) == (2, world + 1, {})
        leaving.clear()
        assert all(bits_equal(source, engine) for engine in engines)
        until(lambda: all(rank.versions == [1, 2] for rank in ranks[1:]))
        step(source, torch.Generator().manual_seed(2), 0.2)
        stats = here.sender.send_weights(timeout_s=5)
        assert set(stats.lost) == {f"engine[{n}/{world}]" for n in range(world)}
        assert stats.receivers == 1
        until(lambda: other.versions == [1, 2, 3])
        assert other.errors == []
