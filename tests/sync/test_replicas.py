"""Ranks of a trainer that drift apart: engines never get a mixture of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch

from deltasync import SyncStats
from deltasync.delta.shard import ShardSpec
from deltasync.errors import ReplicasDiffer, SyncAborted
from tests.worlds.links import Model, bits_equal, random_model, step
from tests.worlds.trainers import Boxes, Sharded, Trainer

SHAPES: dict[str, tuple[int, ...]] = {"a": (600, 512), "b": (16,), "c": (32, 6)}
WHOLE = {name: ShardSpec.whole(shape) for name, shape in SHAPES.items()}
UPPER = ShardSpec((32, 6), (0, 0), (16, 6))
LOWER = ShardSpec((32, 6), (16, 0), (16, 6))

# What each rank holds, a rank that drifts, a tensor in which it does, and which ranks disagree.
CASES: dict[str, tuple[Sequence[Boxes], int, str, str]] = {
    "cut": ([WHOLE, WHOLE], 1, "a", r"ranks \[0\] and \[1\]"),
    "sent-by-one": ([WHOLE, WHOLE], 0, "b", r"ranks \[0\] and \[1\]"),
    "sharded": (
        [WHOLE | {"c": UPPER}, WHOLE | {"c": LOWER}, WHOLE | {"c": UPPER}, WHOLE | {"c": LOWER}],
        3,
        "c",
        r"ranks \[1\] and \[3\]",
    ),
    "not-on-rank-0": ([{"a": WHOLE["a"]}, WHOLE, WHOLE], 2, "c", r"ranks \[1\] and \[2\]"),
}


def started(model: Model, boxes: Sequence[Boxes]) -> tuple[Trainer, list[Sharded]]:
    sources = [Sharded(model, held) for held in boxes]
    return Trainer(sources), sources


@pytest.mark.promise(
    "Errors",
    "`ReplicasDiffer`: names parameters and ranks, nothing is sent, and members stay.",
)
@pytest.mark.parametrize(("boxes", "drifter", "name", "ranks"), CASES.values(), ids=CASES)
def test_ranks_that_drift_apart_send_nothing_until_they_agree(
    boxes: Sequence[Boxes], drifter: int, name: str, ranks: str
) -> None:
    model, engine = random_model(SHAPES, 0), random_model(SHAPES, 1)
    trainer, sources = started(model, boxes)
    with closing(trainer):
        serving = trainer.add(engine)
        trainer.wait(1)
        sources[drifter].held[name].view(-1)[-1] += 1  # before the first sync
        for _ in range(2):
            check(trainer, name, ranks)
        sources[drifter].step()
        trainer.send()
        assert bits_equal(engine, model)
        step(model, torch.Generator().manual_seed(0), 0.1)
        for source in sources:
            source.step()
        sources[drifter].held[name].view(-1)[0] += 1  # and in between
        before = {n: p.clone() for n, p in engine.named_parameters()}
        for _ in range(2):
            check(trainer, name, ranks)
        assert all(torch.equal(p, before[n]) for n, p in engine.named_parameters())
        sources[drifter].step()
        assert trainer.send().kind == "delta"  # the engine is a member still
        assert bits_equal(engine, model)
        assert not serving.errors


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
    trainer, sources = started(model, [whole, whole])
    with closing(trainer):
        trainer.add(engine)
        trainer.wait(1)
        trainer.send()
        sources[1].held["layer58"][3] += 1
        found: list[SyncStats | Exception] = []
        while not found or not isinstance(found[-1], ReplicasDiffer):
            assert len(found) < 10
            found.append(trainer.outcomes()[0])
