"""Syncing after optimizer steps: which steps sync, what a failure does to training, who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import DeltaSyncError, SyncStats, sync_after_step
from deltasync.errors import ConfigError, NoReceivers, StepApplied, SyncAborted
from tests.worlds.links import Fleet, Model, bits_equal, fleet, random_model

Optimizer = torch.optim.Optimizer
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


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "fused adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, fused=True),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about its own compiler
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_of_any_optimizer_is_sent(here: Fleet, name: str) -> None:
    """Called as it is, with a closure, or compiled."""
    replica = joined(here)
    optimizer = OPTIMIZERS[name](here.source)
    told: list[SyncStats | DeltaSyncError] = []
    hook = sync_after_step(optimizer, here.sender, on_error="raise", callback=told.append)

    def closure() -> float:
        backward(here.source, 1)
        return 0.0

    steps: list[Callable[[], object]] = [
        optimizer.step,
        lambda: optimizer.step(closure),
        torch.compile(optimizer.step, backend="eager") if name == "sgd" else optimizer.step,
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
    here: Fleet,
) -> None:
    """Or if none has come yet."""
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    told: list[SyncStats | DeltaSyncError] = []
    hook = sync_after_step(optimizer, here.sender, callback=told.append, timeout_s=60)
    backward(here.source)
    optimizer.step()
    assert isinstance(hook.last_error, NoReceivers)
    assert told == [hook.last_error]
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


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as Accelerate's, which steps without hooks of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every"),
        ({"on_error": "ignore"}, "ignore"),
        ({"on_busy": "later"}, "on_busy"),
        ({"optimizer": []}, "no optimizer"),
        ({"optimizer": "wrapped"}, "Wrapper.*steps the model's own parameters, give that"),
    ],
)
def test_bad_settings_are_refused_and_nothing_is_hooked(
    here: Fleet, options: dict[str, Any], message: str
) -> None:
    inner = torch.optim.SGD(here.source.parameters(), lr=0.1)
    given = {"optimizer": inner} | options
    if given["optimizer"] == "wrapped":
        given["optimizer"] = [inner, Wrapper(inner)]
    with pytest.raises(ConfigError, match=message):
        sync_after_step(sender=here.sender, **given)
    assert not inner._optimizer_step_pre_hooks
    assert not inner._optimizer_step_post_hooks


@pytest.mark.parametrize("error", [RuntimeError("oom"), KeyboardInterrupt("key")])
def test_what_is_no_failed_sync_is_never_swallowed(
    here: Fleet, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> SyncStats:
        raise error

    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender, on_error="continue")
    monkeypatch.setattr(here.sender, "send_weights", fails)
    backward(here.source)
    is_error = isinstance(error, Exception)
    with pytest.raises(StepApplied if is_error else KeyboardInterrupt, match=str(error)) as raised:
        optimizer.step()
    assert not is_error or raised.value.__cause__ is error
    assert hook.failures == is_error


def test_what_the_callback_raises_reaches_the_caller_of_step(here: Fleet) -> None:
    def callback(_: SyncStats | DeltaSyncError) -> None:
        raise ZeroDivisionError

    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    sync_after_step(optimizer, here.sender, callback=callback)
    backward(here.source)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "fused adam"])
def test_a_step_that_a_grad_scaler_skips_changes_nothing(here: Fleet, name: str) -> None:
    """A fused optimizer is called for a skipped step too, and skips by itself."""
    replica = joined(here)
    optimizer = OPTIMIZERS[name](here.source)
    hook = sync_after_step(optimizer, here.sender, on_error="raise")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # makes its state
    nnz = []
    for step in range(3):
        optimizer.zero_grad()
        backward(here.source, step)
        before = here.source.get_parameter("first").detach().clone()
        if step == 1:
            gradient = here.source.get_parameter("second").grad
            assert gradient is not None
            gradient[0, 0] = torch.inf
        syncs = hook.syncs
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, here.source.get_parameter("first")) == (step == 1)
        assert bits_equal(here.source, replica)
        if hook.syncs > syncs:
            assert hook.last_stats is not None
            nnz.append(hook.last_stats.nnz)
    assert nnz in ([64, 64], [64, 0, 64])
    assert hook.failures == 0


def test_two_optimizers_share_a_sender(here: Fleet) -> None:
    replica = joined(here)
    first = torch.optim.SGD([here.source.get_parameter("first")], lr=0.1)
    second = torch.optim.Adam([here.source.get_parameter("second")], lr=0.1)
    hooks = [sync_after_step(first, here.sender), sync_after_step(second, here.sender, every=2)]
    for step in range(4):
        backward(here.source, step)
        first.step()
        second.step()
    assert [hook.syncs for hook in hooks] == [4, 2]
    assert [hook.steps for hook in hooks] == [4, 4]
    assert bits_equal(here.source, replica)
