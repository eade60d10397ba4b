"""Engines that are given a whole checkpoint each time, because of what they make of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from deltasync import ReloadedTarget
from deltasync.errors import ConfigError, EngineFailed, LayoutMismatch, SyncAborted
from tests.worlds.links import fleet, random_model
from tests.worlds.toy_engines import specs

SHAPES = {"a": (40, 16), "b": (16,), "c": (7, 3)}


def test_what_the_engine_held_before_the_first_sync_cannot_be_put_back() -> None:
    source, loaded = random_model(SHAPES, 0), dict[str, Tensor]()
    weights = {name: tensor.data for name, tensor in source.named_parameters()}
    failures = [EngineFailed("planted")]

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in given:
            loaded[name] = tensor.clone()
            if failures:
                raise failures.pop()

    with fleet(source) as here:
        serving = here.add(ReloadedTarget(specs(weights), load))
        here.wait(1)
        with pytest.raises(SyncAborted):
            here.sender.send_weights()
        assert (serving.receiver.is_dirty, len(loaded)) == (True, 1)
        here.wait(1)
        assert here.sender.send_weights().full_synced == 1
        assert not serving.receiver.is_dirty
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_what_is_known_must_be_as_the_trainer_has_it() -> None:
    """Another dtype that is rounded to may be: see `test_target_histories.py`."""
    target = ReloadedTarget(specs({"a": torch.zeros(40, 16)}), lambda weights: None)
    for odd in (torch.zeros(40, 15), torch.zeros(40, 16, dtype=torch.float16)):
        with pytest.raises(LayoutMismatch, match="a: torch"):
            target.set_loaded_weights([("other", torch.zeros(1)), ("a", odd)])


def test_a_reload_that_fails_is_refused_without_a_way_that_would_fail_too() -> None:
    """It changes nothing, and `accept_stale_weights` is no way on."""
    engine = nn.Linear(16, 40, bias=False)
    weights = {"weight": torch.zeros(40, 16)}
    before = engine.weight.detach().clone()

    def load(given: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in given:
            engine.weight.data = tensor.clone()
        raise AttributeError("planted")

    target = ReloadedTarget(specs(weights), load, module=engine)
    target.set_loaded_weights(weights.items())
    with pytest.raises(ConfigError, match="cannot be reloaded, since that raised") as caught:
        target.reload()
    assert "accept_stale_weights" not in str(caught.value)
    assert torch.equal(engine.weight, before)
