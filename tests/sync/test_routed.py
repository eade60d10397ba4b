"""An engine whose parameters are not the checkpoint's holds what its own loader would load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from deltasync import ReceiverOptions, SenderOptions
from deltasync.delta.bits import as_bits
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import ConfigError, DigestMismatch, SyncAborted
from tests.worlds.links import Model, bits_equal, fleet, random_model, step
from tests.worlds.toy_engines import (
    CHECKPOINT,
    Rank,
    Wide,
    fails,
    fixed,
    is_as,
    joined,
    rank_of,
    routed,
    specs,
    state_of,
    trainer,
)

Given = Iterable[tuple[str, Tensor]]


class Shuffling(Rank):
    """Keeps the halves of its experts the other way round once they are loaded."""

    def finish(self) -> None:
        w1 = self.get_parameter("w1").data
        w1.copy_(torch.cat(w1.chunk(2, dim=1)[::-1], dim=1))


def whole(seed: int, kind: type[Rank] = Wide) -> Any:
    return rank_of(trainer(seed), 0, 1, kind)


def test_syncs_write_by_routes_alone() -> None:
    source, engine = trainer(0), whole(1)
    loaded: list[str] = []

    def load(weights: Given) -> None:
        for name, tensor in weights:
            loaded.extend([name] * (not tensor.is_meta))
            engine.load_weights([(name, tensor)])

    with joined(source, RoutedTarget(engine, CHECKPOINT, load=load)) as here:
        step(source, torch.Generator().manual_seed(0), 0.5)
        assert here.sender.send_weights().kind == "delta"
        assert bits_equal(engine, rank_of(source, 0, 1, Wide))
    assert loaded == []


@pytest.mark.promise("Cost", "A full sync into an engine with routes is written as it arrives.")
def test_a_full_sync_holds_nothing_back() -> None:
    shapes = {f"w{number}": (40, 4) for number in range(20)}
    source, engine = (random_model(shapes, seed).bfloat16() for seed in range(2))
    options, receiving = SenderOptions(bucket_bytes=300), ReceiverOptions(max_staged_bytes=1)
    with joined(source, routed(engine), options=options, receiving=receiving) as here:
        assert here.first.full_synced == 1
        assert here.first.receiver_bytes <= 3 * 300  # a parameter has 320 bytes
    assert bits_equal(source, engine)


def test_tied_names_reach_the_loader_as_it_knows_them() -> None:
    source, engine = Model({"head": torch.randn(4, 3)}), Model({"tok": torch.zeros(4, 3)})
    source.register_parameter("tok", source.get_parameter("head"))
    with joined(source, routed(engine)):
        assert torch.equal(engine.get_parameter("tok"), source.get_parameter("tok"))


def test_a_layout_that_changes_after_a_full_sync_is_found_before_a_delta() -> None:
    source, engine = trainer(0), whole(1, Shuffling)
    with fleet(source) as here:
        serving = here.add(RoutedTarget(engine, CHECKPOINT, finish=engine.finish))
        here.wait(1)
        error = fails(here, r"gate0.* the engine changes its layout")
        assert isinstance(error, DigestMismatch)
        assert serving.receiver.is_dirty


def test_an_engine_that_moves_its_weights_when_it_finishes_is_told() -> None:
    source, engine = trainer(0), whole(1)

    def finish() -> None:
        engine.o.data = engine.o.data.clone()

    refused = pytest.raises(SyncAborted, match="storage of the engine was replaced")
    with refused, joined(source, RoutedTarget(engine, CHECKPOINT, finish=finish)):
        pass


def test_what_the_engine_was_started_on_is_read_back() -> None:
    weights = [(name, w.data) for name, w in trainer(0).named_parameters()]
    target = RoutedTarget(whole(0), CHECKPOINT)
    target.verify_routes(weights)
    with pytest.raises(
        ConfigError, match="has no 'down0': start the engine on a checkpoint that has it"
    ):
        target.verify_routes([(name, tensor) for name, tensor in weights if name != "down0"])
    shuffled = whole(0, Shuffling)
    shuffled.finish()
    with pytest.raises(ConfigError, match=r"2 tensors have no route: 'gate0', .* are not where"):
        RoutedTarget(shuffled, CHECKPOINT).verify_routes(weights)


HELD = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4), "c": torch.zeros(4)}


def copying(model: Model, weights: Given) -> None:
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)


def computing(model: Model, weights: Given) -> None:
    copying(model, ((n, t + 1 if n == "c" else t) for n, t in weights))


def replacing(model: Model, weights: Given) -> None:
    for name, tensor in weights:
        copying(model, [(name, tensor)] if name != "b" else [])
        if name == "b":
            model.b = fixed(tensor)


def exchanging(model: Model, weights: Given) -> None:
    for name, tensor in weights:
        model.get_parameter(name).data = torch.ones(tensor.shape)


def lazy(model: Model, weights: Given) -> Any:
    yield from weights


def expanding(model: Model, weights: Given) -> None:
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor.expand(4, 4) if name == "b" else tensor)


def repeating(model: Model, weights: Given) -> None:
    for name, tensor in weights:
        if name == "b":
            copying(model, [("b", tensor)])
        else:
            copying(model, [("a", tensor)])
            model.get_parameter("c").data.copy_(tensor[0])


FOUR = torch.zeros(4)


@pytest.mark.parametrize(
    ("load", "changes", "why"),
    [
        (computing, {}, r"2 tensors have no route: 'c' is not only copied: aten.add"),
        (copying, {"c": None}, None),  # it is left as it is
        (replacing, {}, "the loader replaces 'b', where it should fill"),
        (exchanging, {}, "'a': the loader replaces its storage"),
        (lazy, {}, "'a' is not asked for"),
        (expanding, {"b": FOUR}, "'b' has no route: .* twice"),
        (repeating, {"c": None}, "'a' has no route: .* twice, in 'a' and 'c'"),
        (lambda m, w: m.a.data[:1].copy_(dict(w)["a"]), {"a": FOUR}, "'a': the loader does not co"),
    ],
)
def test_what_has_no_route_is_refused_by_name(
    load: Callable[[Model, Given], None], changes: dict[str, Tensor | None], why: str | None
) -> None:
    made = Model({name: tensor.clone() for name, tensor in HELD.items()})
    before = dict(made.named_parameters())
    checkpoint = specs({n: t for n, t in (HELD | changes).items() if t is not None})
    target = RoutedTarget(made, checkpoint, load=lambda weights: load(made, weights))
    if why is None:
        assert len(target.bind(target.parameters())) == len(checkpoint)
    else:
        with pytest.raises(ConfigError, match=why) as raised:
            target.bind(target.parameters())
        assert "EngineSync(without_routes='reload')" in str(raised.value)
        assert "\n" not in str(raised.value)
    after = dict(made.named_parameters())
    assert all(before[name] is after[name] and not after[name].any() for name in before)


# Ranks, none of which holds the whole checkpoint.


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([0, 0], "engine takes nothing of 'last'"),
        ([0, 1, 0], "its ranks hold 84 elements of 'embed', which has 52"),
    ],
)
def test_ranks_that_do_not_add_up_are_refused_by_name(ranks: list[int], why: str) -> None:
    targets = [RoutedTarget(Rank(rank), CHECKPOINT) for rank in ranks]
    with pytest.raises(SyncAborted, match=why), joined(trainer(0), *targets):
        pass


def test_a_rank_takes_what_it_holds_of_the_end_of_a_tensor() -> None:
    source, rank = trainer(0), rank_of(trainer(0), 1)
    before, target = state_of(rank), RoutedTarget(rank, CHECKPOINT)
    layout = target.parameters()
    for number, live in target.bind(layout).items():
        bits = as_bits(source.get_parameter(layout[number].name).data.bfloat16()).reshape(-1)
        live.write(len(bits) // 3, bits[len(bits) // 3 :])
    assert is_as(rank, before)
