"""Engines that do otherwise than at connect, or lack memory; trainers that follow one another."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from deltasync.engines.proof.reach import Reach
from deltasync.engines.routed import RoutedTarget
from deltasync.errors import ConfigError, EngineFailed, SyncAborted, TargetMoved
from tests.delta.lacks import LACKS
from tests.engines.checkpoints import Weights
from tests.worlds.links import fleet, until
from tests.worlds.repacking_engines import (
    Fused,
    Matrix,
    beyond,
    check_is,
    clamped,
    copied,
    followed,
    having,
    learnt_of,
    matrices,
    reordered,
    scaled,
    verified,
)
from tests.worlds.toy_engines import fixed, is_as, of, proof_of, specs, state_of

State = dict[str, Tensor]


class Placed(Matrix):
    """Puts what it computes somewhere else, once it is told where.

    Attributes:
        place: Is given the layer, and a parameter that was loaded.
    """

    place: ClassVar[Callable[[Any, Any], object] | None] = None

    def work(self) -> None:
        loaded = getattr(self, "whole", self.scale)
        super().work()
        if Placed.place is not None:
            Placed.place(self, loaded)


class Elsewhere(Placed, Fused):
    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}


class Clamped(Matrix):
    work = clamped


class Attached(Placed, Clamped):
    """Clamps its scales where they are."""


def another_attribute(layer: Any, loaded: Any) -> None:
    layer.whole, layer.other = loaded, layer.whole


def failing(layer: Any, loaded: Any) -> None:
    raise ZeroDivisionError("planted")


PLACES: dict[str, Callable[[Any, Any], object]] = {
    "another attribute": another_attribute,
    "dict": lambda own, _: own.config.update(whole=own.whole),
    "another shape": lambda own, _: setattr(own.kernel, "limit", own.kernel.limit.view(1)),
    "a missing one": lambda own, _: delattr(own, "inverse"),
    "the code raises": failing,
    "attached to what was loaded": lambda own, loaded: vars(loaded).update(kept=own.scale.data + 0),
}


@pytest.mark.promise(
    "Bits",
    "What an engine computes of small tensors, such as scales, is computed again in the "
    "decision that writes them, or the old version stays.",
)
@pytest.mark.parametrize("place", PLACES)
def test_what_goes_elsewhere_than_at_connect_fails_the_sync(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps its version, and follows when its code does as it did."""
    is_attached = place.startswith("attached")
    made, draw = (Attached, matrices) if is_attached else (Elsewhere, scaled)
    with followed(of(made).started(draw(0)), draw(0)) as it:
        it.follows(draw(1))
        monkeypatch.setattr(Placed, "place", staticmethod(PLACES[place]))
        error = it.fails(draw(2))
        assert isinstance(error, EngineFailed)
        assert "'layers.0'" in str(error)
        assert ("planted" in str(error)) == (place == "the code raises")
        monkeypatch.setattr(Placed, "place", None)
        it.follows(draw(2))


class Shared(Elsewhere):
    """Both instances have one object, which the live one changes while it serves."""

    shared: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.common = self.shared


def test_what_the_engine_changes_meanwhile_in_shared_objects_stays() -> None:
    Shared.shared.clear()
    with followed(of(Shared).started(scaled(0)), scaled(0)) as it:
        for seed in (1, 2, 3):
            Shared.shared[f"step {seed}"] = seed
            it.follows(scaled(seed))
            assert len(Shared.shared) == seed


def test_a_result_that_was_replaced_is_named_and_refused_when_the_receiver_rejoins() -> None:
    with followed(of(Fused).started(scaled(0)), scaled(0)) as it:
        kernel = it.engine.layers[1].kernel
        kept, kernel.limit = kernel.limit, kernel.limit.clone()
        assert "kernel.limit" in str(it.fails(scaled(1)))
        kernel.limit = kept
        it.follows(scaled(1))
        it.engine.layers[1].alpha = fixed(torch.zeros(()))
        it.serving.receiver.invalidate()
        for _ in range(2):  # the first one may only find that the connection was lost
            it.here.wait(1)
            with pytest.raises(SyncAborted):
                it.here.sender.send_weights(timeout_s=60)
        until(lambda: any("has replaced 'layers.1.alpha'" in str(e) for e in it.serving.errors))


def test_an_engine_that_lays_out_its_parameters_in_another_way_is_refused() -> None:
    engine = of(Matrix).started(matrices(0))
    learnt = learnt_of(engine, matrices(0))
    target = RoutedTarget(engine, specs(matrices(0)), learnt=learnt)
    target.bind(target.parameters())
    engine.layers[1].scale = fixed(engine.layers[1].scale.data.contiguous())
    for _ in range(2):
        with pytest.raises(TargetMoved):
            target.check_unmoved()
    with pytest.raises(ConfigError, match="laid out its parameters in another way"):
        target.parameters()


def test_another_trainer_goes_on_with_what_is_kept() -> None:
    """One that sends other tensors, after a first one has written the engine."""
    first, now = scaled(0), scaled(1)
    engine, beside = of(Fused).started(first), dict[str, Tensor]()
    before = state_of(engine)
    one = RoutedTarget(engine, specs(first), learnt=learnt_of(engine, first, beside))
    one.verify_routes(first.items(), lambda: proof_of(engine))
    routes = one.routes()
    with fleet(Weights(now)) as here:
        here.add(one)
        here.wait(1)
        here.sender.send_weights()
    some = {name: tensor for name, tensor in now.items() if name != "norm"}
    two = RoutedTarget(engine, specs(some), learnt=learnt_of(engine, some, beside))
    two.verify_routes(first.items(), lambda: proof_of(engine), keep=["norm"], routes=routes)
    check_is(engine, now, before)
    source = copied(some)
    with fleet(source) as here:
        here.add(two)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 0
        source.take({n: t for n, t in scaled(2).items() if n in some})
        here.sender.send_weights()
        check_is(engine, scaled(2) | {"norm": now["norm"]}, before)


def test_many_syncs_keep_no_memory_and_search_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results are is found at connect."""

    def held() -> int:
        gc.collect()
        return sum(type(one) in (Tensor, Reach) for one in gc.get_objects())

    def search(*args: object, **options: object) -> None:
        raise AssertionError("searched")

    with followed(of(Fused).started(scaled(0)), scaled(0)) as it:
        monkeypatch.setattr(Reach, "__init__", search)
        for seed in range(1, 26):
            it.source.take(scaled(seed))
            it.here.sender.send_weights()
            if seed == 10:
                few = held() + 20
        until(lambda: held() <= few)  # the engine's thread may be busy after a sync
        monkeypatch.undo()
        check_is(it.engine, scaled(25), it.before)


class Lacking:
    """Work that finds no memory at a call, and at all after it if `forever`."""

    def __init__(self, lack: Exception) -> None:
        self.lack, self.calls, self.at, self.forever = lack, 0, 0, False

    def __call__(self, matrix: Any) -> None:
        self.calls += 1
        if self.at and (self.calls == self.at or (self.forever and self.calls > self.at)):
            raise self.lack
        beyond(matrix)  # which no proof with the engine's own scales would find


@pytest.mark.parametrize(
    ("lack", "forever"), [*((lack, False) for lack in LACKS), (LACKS[0], True)], ids=type
)
def test_without_memory_an_engine_is_refused_and_stays_as_it_was(
    lack: Exception, forever: bool
) -> None:
    work, now = Lacking(lack), reordered(0.5)
    kind = having(work)
    engine = kind.started(now)
    started = work.calls
    verified(engine, now)
    total = work.calls - started
    assert total > 20
    for at in range(1, total + 1, 9):
        engine = kind.started(now)
        before = state_of(engine)
        work.calls, work.at, work.forever = 0, at, forever
        try:
            target = verified(engine, now)
        except ConfigError:
            continue
        finally:
            work.at = 0
            assert is_as(engine, before)
        assert not forever
        assert target.learnt is not None
        assert target.learnt.recomputed._works
