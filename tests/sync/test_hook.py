"""Syncing after optimizer steps: which steps sync, what a failure does to training, who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from deltasync import DeltaSyncError, SyncStats, sync_after_step
from deltasync.errors import NoReceivers, StepApplied, SyncAborted
from tests.worlds.links import Fleet, Model, bits_equal, fleet, random_model

SHAPES = {"first": (8, 4), "second": (8, 4)}


def model(seed: int = 0) -> Model:
    """Two parameters that learn."""
    return random_model(SHAPES, seed).requires_grad_(True)


def backward(source: nn.Module, seed: int = 0) -> None:
    """Add to the gradients of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in source.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@pytest.fixture
def here() -> Iterator[Fleet]:
    """A sender without receivers."""
    with fleet(model()) as made:
        yield made


def joined(here: Fleet) -> Model:
    """A replica that is a member."""
    replica = model(1)
    here.add(replica)
    here.wait(1)
    here.sender.send_weights(timeout_s=60)
    return replica


@pytest.mark.filterwarnings("ignore")  # of torch, about its own compiler
@pytest.mark.parametrize("is_fused", [False, True])
def test_every_step_of_any_optimizer_is_sent(here: Fleet, is_fused: bool) -> None:
    """Called as it is, with a closure, or compiled."""
    replica = joined(here)
    optimizer = torch.optim.Adam(here.source.parameters(), lr=0.1, fused=is_fused)
    told: list[SyncStats | DeltaSyncError] = []
    hook = sync_after_step(optimizer, here.sender, on_error="raise", callback=told.append)

    def closure() -> float:
        backward(here.source, 1)
        return 0.0

    steps: list[Callable[[], object]] = [
        optimizer.step,
        lambda: optimizer.step(closure),
        optimizer.step if is_fused else torch.compile(optimizer.step, backend="eager"),
    ]
    for step in steps:
        optimizer.zero_grad()
        backward(here.source)
        step()
        assert bits_equal(here.source, replica)
    assert (hook.steps, hook.syncs, hook.failures, hook.last_error) == (3, 3, 0, None)
    assert told[-1] is hook.last_stats
    assert hook.last_stats is not None
    assert (hook.last_stats.kind, hook.last_stats.nnz) == ("delta", 64)


def test_steps_between_two_syncs_lose_nothing(here: Fleet) -> None:
    replica = joined(here)
    optimizer = torch.optim.Adam(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender, every=3)
    equal = []
    for step in range(7):
        backward(here.source, step)
        optimizer.step()
        equal.append(bits_equal(here.source, replica))
    assert equal == [False, False, True, False, False, True, False]
    assert (hook.steps, hook.syncs) == (7, 2)
    hook.remove()
    hook.remove()
    for _ in range(2):
        optimizer.step()
    assert (hook.steps, hook.syncs) == (7, 2)


@pytest.mark.promise(
    "All or nothing",
    "A failed sync is counted and kept in `last_error`; training continues.",
)
def test_training_goes_on_when_a_receiver_is_lost_and_the_next_sync_covers_both(
    here: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Or if none has come yet."""
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    told: list[SyncStats | DeltaSyncError] = []
    hook = sync_after_step(optimizer, here.sender, callback=told.append, timeout_s=60)
    backward(here.source)
    optimizer.step()
    assert isinstance(hook.last_error, NoReceivers)
    assert told == [hook.last_error]
    assert "training goes on" in caplog.text
    replica = joined(here)
    here.serving.pop("engine/0").stop()
    optimizer.step()
    assert isinstance(hook.last_error, SyncAborted)
    assert told[1:] == [hook.last_error]
    assert not bits_equal(here.source, replica)
    here.add(replica)
    here.wait(1)
    optimizer.step()
    assert (hook.steps, hook.syncs, hook.failures) == (3, 1, 2)
    assert bits_equal(here.source, replica)


@pytest.mark.promise(
    "Errors",
    "`StepApplied`: the step was applied, and the message says why the sync failed.",
)
def test_raising_says_that_the_step_was_applied_and_why_the_sync_failed(here: Fleet) -> None:
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender, on_error="raise")
    before = here.source.get_parameter("first").detach().clone()
    backward(here.source)
    with pytest.raises(StepApplied, match=r"step was applied.* no receiver") as raised:
        optimizer.step()
    assert raised.value.__cause__ is hook.last_error
    assert isinstance(hook.last_error, NoReceivers)
    assert hook.failures == 1
    assert not torch.equal(before, here.source.get_parameter("first"))


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt("planted")])
def test_what_is_no_failed_sync_is_never_swallowed(
    here: Fleet, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> SyncStats:
        raise error

    monkeypatch.setattr(here.sender, "send_weights", fails)
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    sync_after_step(optimizer, here.sender, on_error="continue")
    backward(here.source)
    expected = StepApplied if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected, match="planted"):
        optimizer.step()
