"""Ranks of a trainer that drift apart: engines never get a mixture of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from deltasync.delta.shard import ShardSpec
from deltasync.errors import ReplicasDiffer, SyncAborted
from tests.worlds.links import bits_equal, random_model, step
from tests.worlds.trainers import Boxes, Trainer, trainer_of

SHAPES: dict[str, tuple[int, ...]] = {"a": (600, 512), "b": (16,), "c": (32, 6)}
WHOLE = {name: ShardSpec.whole(shape) for name, shape in SHAPES.items()}
UPPER = WHOLE | {"c": ShardSpec((32, 6), (0, 0), (16, 6))}
LOWER = WHOLE | {"c": ShardSpec((32, 6), (16, 0), (16, 6))}


@pytest.mark.promise(
    "Errors",
    "`ReplicasDiffer`: names parameters and ranks, nothing is sent, and members stay.",
)
@pytest.mark.parametrize(
    ("boxes", "drifter", "name", "ranks"),
    [
        ([WHOLE, WHOLE], 1, "a", r"ranks \[0\] and \[1\]"),
        ([UPPER, LOWER, UPPER, LOWER], 3, "c", r"ranks \[1\] and \[3\]"),
        ([{"a": WHOLE["a"]}, WHOLE, WHOLE], 2, "c", r"ranks \[1\] and \[2\]"),
    ],
    ids=["whole", "sharded", "not on rank 0"],
)
def test_ranks_that_drift_apart_send_nothing_until_they_agree(
    boxes: Sequence[Boxes], drifter: int, name: str, ranks: str
) -> None:
    """Before the first sync, and before a delta."""
    model, engine = random_model(SHAPES, 0), random_model(SHAPES, 1)
    with trainer_of(model, boxes) as here:
        here.add(engine)
        here.wait(1)
        for kind in ("full", "delta"):
            step(model, torch.Generator().manual_seed(0), 0.1)
            here.step()
            here.sources[drifter].held[name].view(-1)[-1] += 1
            before = {n: p.clone() for n, p in engine.named_parameters()}
            for _ in range(2):
                check(here, name, ranks)
            assert all(torch.equal(p, before[n]) for n, p in engine.named_parameters())
            here.step()
            assert here.send().kind == kind  # the engine is a member still
            assert bits_equal(engine, model)


def check(trainer: Trainer, name: str, ranks: str) -> None:
    """Sync in vain: rank 0 names the parameter and the ranks, and the others say so."""
    first, *others = trainer.outcomes()
    assert isinstance(first, ReplicasDiffer)
    assert re.search(rf"^{ranks} have drifted apart, in '{name}' at least", str(first))
    for other in others:
        assert isinstance(other, SyncAborted)
        assert "ReplicasDiffer" in str(other)


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Ranks that have drifted apart send nothing: all that they hold alike is compared at the "
    "first sync, and a part in each later one.",
)
def test_a_drift_of_one_among_many_parameters_is_found_within_some_syncs() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"layer{n}": (8,) for n in range(600)}
    whole = {name: ShardSpec.whole(shape) for name, shape in shapes.items()}
    model, engine = random_model(shapes, 0), random_model(shapes, 1)
    with trainer_of(model, [whole, whole]) as here:
        here.add(engine)
        here.wait(1)
        here.send()
        here.sources[1].held["layer58"][3] += 1
        assert any(isinstance(here.outcomes()[0], ReplicasDiffer) for _ in range(10))
