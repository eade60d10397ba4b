"""Syncing after optimizer steps: which steps sync, what a failure does to training, who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from deltasync import DeltaSyncError, SyncStats, sync_after_step
from deltasync.errors import ConfigError, NoReceivers, StepApplied, SyncAborted
from tests.worlds.links import Fleet, Model, bits_equal, fleet

Optimizer = torch.optim.Optimizer


def model(seed: int = 0) -> Model:
    """Two parameters that learn."""
    generator = torch.Generator().manual_seed(seed)
    made = Model({n: torch.randn(8, 4, generator=generator) for n in ("first", "second")})
    return made.requires_grad_(True)


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
    here.sender.send_weights(timeout_s=5)
    return replica


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "fused adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, fused=True),
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_step_of_any_optimizer_is_sent(
    here: Fleet, make: Callable[[nn.Module], Optimizer]
) -> None:
    replica = joined(here)
    optimizer = make(here.source)
    told: list[SyncStats | DeltaSyncError] = []
    hook = sync_after_step(optimizer, here.sender, callback=told.append)
    for step in range(3):
        optimizer.zero_grad()
        backward(here.source, step)
        optimizer.step()
        assert bits_equal(here.source, replica)
    assert (hook.steps, hook.syncs, hook.failures, hook.last_error) == (3, 3, 0, None)
    assert told[-1] is hook.last_stats
    assert hook.last_stats is not None
    assert (hook.last_stats.kind, hook.last_stats.nnz) == ("delta", 64)


def test_accumulating_gradients_syncs_at_steps_only(here: Fleet) -> None:
    replica = joined(here)
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender)
    version = here.sender.version
    for micro in range(6):
        backward(here.source, micro)
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert (hook.syncs, here.sender.version) == (2, version + 2)
    assert bits_equal(here.source, replica)


def test_a_step_that_takes_a_closure_syncs_once(here: Fleet) -> None:
    replica = joined(here)
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender)

    def closure() -> float:
        backward(here.source)
        return 0.0

    optimizer.step(closure)
    assert hook.syncs == 1
    assert bits_equal(here.source, replica)


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


@pytest.mark.parametrize("name", ["sgd", "adam", "fused adam", "fused adamw"])
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


def test_training_goes_on_without_a_receiver_and_the_next_sync_covers_both(here: Fleet) -> None:
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    told: list[SyncStats | DeltaSyncError] = []
    hook = sync_after_step(optimizer, here.sender, callback=told.append)
    backward(here.source)
    optimizer.step()
    optimizer.step()
    assert (hook.steps, hook.syncs, hook.failures) == (2, 0, 2)
    assert isinstance(hook.last_error, NoReceivers)
    assert told[-1] is hook.last_error
    replica = model(1)
    here.add(replica)
    here.wait(1)
    optimizer.step()
    assert (hook.syncs, hook.failures) == (1, 2)
    assert bits_equal(here.source, replica)


@pytest.mark.promise(
    "All or nothing",
    "A failed sync is counted and kept in `last_error`; training continues.",
)
def test_training_goes_on_when_a_receiver_is_lost_and_the_next_sync_covers_both(
    here: Fleet,
) -> None:
    replica = joined(here)
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    told: list[SyncStats | DeltaSyncError] = []
    hook = sync_after_step(optimizer, here.sender, callback=told.append, timeout_s=2)
    here.serving.pop("engine/0").stop()
    backward(here.source)
    optimizer.step()
    assert isinstance(hook.last_error, SyncAborted)
    assert told == [hook.last_error]
    assert not bits_equal(here.source, replica)
    here.add(replica)
    here.wait(1)
    optimizer.step()
    assert (hook.steps, hook.syncs, hook.failures) == (2, 1, 1)
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
    with pytest.raises(StepApplied, match="step was applied") as raised:
        optimizer.step()
    assert raised.value.__cause__ is hook.last_error
    assert isinstance(hook.last_error, NoReceivers)
    assert hook.failures == 1
    assert not torch.equal(before, here.source.get_parameter("first"))


def test_removed_hooks_sync_no_more(here: Fleet) -> None:
    replica = joined(here)
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender)
    hook.remove()
    hook.remove()
    backward(here.source)
    optimizer.step()
    assert (hook.steps, hook.syncs) == (0, 0)
    assert not bits_equal(here.source, replica)


@pytest.mark.parametrize("every", [0, -1])
def test_a_bad_every_is_refused_and_nothing_is_hooked(here: Fleet, every: int) -> None:
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="every"):
        sync_after_step(optimizer, here.sender, every=every)
    assert not optimizer._optimizer_step_post_hooks


def test_a_bad_on_error_is_refused_and_nothing_is_hooked(here: Fleet) -> None:
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="ignore"):
        sync_after_step(optimizer, here.sender, on_error="ignore")  # type: ignore[arg-type]
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("error", [MemoryError("full"), RuntimeError("out of memory")])
def test_what_is_no_failed_sync_is_never_swallowed(
    here: Fleet, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: object) -> SyncStats:
        raise error

    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender, on_error="continue")
    monkeypatch.setattr(here.sender, "send_weights", fails)
    backward(here.source)
    with pytest.raises(StepApplied, match=str(error)) as raised:
        optimizer.step()
    assert raised.value.__cause__ is error
    assert hook.failures == 1


def test_an_interrupt_stays_an_interrupt(here: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> SyncStats:
        raise KeyboardInterrupt

    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    sync_after_step(optimizer, here.sender)
    monkeypatch.setattr(here.sender, "send_weights", interrupted)
    backward(here.source)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()


def test_what_the_callback_raises_reaches_the_caller_of_step(here: Fleet) -> None:
    def callback(_: SyncStats | DeltaSyncError) -> None:
        raise ZeroDivisionError

    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    sync_after_step(optimizer, here.sender, callback=callback)
    backward(here.source)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()


@pytest.mark.filterwarnings("ignore")  # of torch, about its own compiler
def test_a_compiled_step_is_followed(here: Fleet) -> None:
    replica = joined(here)
    optimizer = torch.optim.SGD(here.source.parameters(), lr=0.1)
    hook = sync_after_step(optimizer, here.sender, on_error="raise")
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(2):
        backward(here.source, step)
        compiled()
    assert hook.syncs == 2
    assert bits_equal(here.source, replica)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as Accelerate's, which steps without hooks of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_a_wrapper_whose_hooks_never_run_is_refused_and_nothing_is_hooked(here: Fleet) -> None:
    inner = torch.optim.SGD(here.source.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Wrapper.*steps the model's own parameters, give that"):
        sync_after_step([inner, Wrapper(inner)], here.sender)
    assert not inner._optimizer_step_pre_hooks
    assert not inner._optimizer_step_post_hooks


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
