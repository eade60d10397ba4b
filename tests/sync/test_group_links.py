"""Trainers of two ranks in processes of their own, with lanes over torch.distributed."""

from __future__ import annotations

import pytest
import torch

from deltasync import (
    ModuleTarget,
    SenderOptions,
    TrainerGroup,
    TrainerRank,
    WeightReceiver,
    WeightSender,
)
from deltasync.transports.collective import Receiver, Sender
from tests.worlds.links import Model, bits_equal, random_model, step
from tests.worlds.ranks import free_port, run_ranks
from tests.worlds.trainers import Sharded, rows_of

TRAINERS, VERSIONS = 2, 3
SECRET = b"of lanes, which greet twice then"
SHAPES = {"a": (300, 70), "b": (41, 900), "norm": (64,), "odd": (1, 5)}


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multigpu)])
def test_receivers_follow_two_ranks(backend: str) -> None:
    """On GPUs trainers share the first one, and each receiver has one to itself."""
    ports = [free_port() for _ in range(TRAINERS + 1)]
    receivers = 2 if backend == "gloo" else min(2, torch.cuda.device_count() - 1)
    run_ranks(take_part, TRAINERS + receivers, receivers, backend, ports, timeout_s=150)


def take_part(rank: int, receivers: int, backend: str, ports: list[int]) -> None:
    if rank >= TRAINERS:
        follow(rank - TRAINERS, backend, ports)
        return
    device = "cpu" if backend == "gloo" else "cuda:0"
    module = random_model(SHAPES, 1)
    source = Sharded(module, rows_of(module, TRAINERS)[rank], device)
    lane = Sender(port=ports[rank], backend=backend, device=device, secret=SECRET)
    options = SenderOptions(bucket_bytes=10_000)
    sender: WeightSender | TrainerRank
    if rank == 0:
        group = TrainerGroup(Sender(port=ports[-1], secret=SECRET), TRAINERS)
        sender = WeightSender(source, lane, options=options, group=group)
        sender.wait_for_receivers(receivers)
    else:
        hub = Receiver("127.0.0.1", ports[-1], secret=SECRET)
        sender = TrainerRank(source, lane, hub, rank=rank, world=TRAINERS, options=options)
    for version in range(1, VERSIONS + 1):
        advance(module, version)
        source.step()
        stats = sender.send_weights(timeout_s=60)
        assert (stats.version, stats.receivers, stats.lost) == (version, receivers, {})
        assert stats.num_buckets > 2
    sender.close()


def follow(number: int, backend: str, ports: list[int]) -> None:
    device = "cpu" if backend == "gloo" else f"cuda:{number + 1}"
    expected, module = random_model(SHAPES, 1), random_model(SHAPES, 2)
    module.to(device)
    first, *lanes = [
        Receiver("127.0.0.1", port, backend=backend, device=device, secret=SECRET)
        for port in ports[:TRAINERS]
    ]
    target, engine = ModuleTarget(module), f"engine-{number}"
    receiver = WeightReceiver(target, first, lanes=lanes, engine=engine)
    for version in range(1, VERSIONS + 1):
        assert receiver.receive_weights() == version
        advance(expected, version)
        held = Model({name: tensor.cpu() for name, tensor in module.named_parameters()})
        assert bits_equal(held, expected)
    with pytest.raises(ConnectionError):  # the trainer ends, and not before all have received
        receiver.receive_weights()
    receiver.close()


def advance(module: Model, version: int) -> None:
    step(module, torch.Generator().manual_seed(version), 0.3)
