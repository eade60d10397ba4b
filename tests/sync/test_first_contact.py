"""What is got wrong at first is told in a word: ends, options, a hook whose syncs fail."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from deltasync import (
    ModuleSource,
    ModuleTarget,
    Policy,
    ReceiverOptions,
    SenderOptions,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import ConfigError, DeltaSyncError, NoReceivers
from deltasync.sync.stats import SyncStats
from deltasync.transports import inprocess

MODEL: Any = nn.Linear(2, 2)
LINK: Any = inprocess.Sender()
SOURCE, TARGET = ModuleSource(MODEL), ModuleTarget(MODEL)
ANY: Any = None

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "module as source": (lambda: WeightSender(MODEL, LINK), r"give ModuleSource\(module\)"),
    "state dict as source": (lambda: WeightSender(MODEL.state_dict(), LINK), "is a OrderedDict"),
    "target as source": (lambda: WeightSender(as_any(TARGET), LINK), "is a ModuleTarget"),
    "address of sender": (
        lambda: WeightSender(SOURCE, as_any("/run/w.sock")),
        r"'/run/w.sock', an address: .*shared_memory.Sender\('/run/w.sock'\)",
    ),
    "path of receiver": (
        lambda: WeightReceiver(TARGET, as_any(Path("/run/w.sock"))),
        r"'/run/w.sock', an address: .*shared_memory.Receiver\('/run/w.sock'\)",
    ),
    "other end of sender": (lambda: WeightSender(SOURCE, LINK.receiver()), "give a Sender"),
    "other end of receiver": (lambda: WeightReceiver(TARGET, LINK), "give a Receiver"),
    "no transport": (lambda: WeightSender(SOURCE, ANY), "is a NoneType; give a Sender"),
    "module as target": (
        lambda: WeightReceiver(MODEL, LINK.receiver()),
        r"give ModuleTarget\(module\)",
    ),
    "source as target": (lambda: WeightReceiver(as_any(SOURCE), LINK.receiver()), "ModuleSource"),
    "dict of options": (
        lambda: WeightSender(SOURCE, LINK, options=as_any({"bucket_bytes": 1 << 20})),
        r"options is a dict; give SenderOptions\(...\)",
    ),
    "options of the other end": (
        lambda: WeightReceiver(TARGET, LINK.receiver(), options=as_any(SenderOptions())),
        r"give ReceiverOptions\(...\)",
    ),
    "sender as optimizer": (
        lambda: sync_after_step(as_any(WeightSender(SOURCE, LINK)), ANY),
        "optimizer is a WeightSender",
    ),
    "module as sender": (lambda: sync_after_step(sgd(), MODEL), "sender is a Linear"),
}


def as_any(value: object) -> Any:
    return value


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.promise(
    "Errors",
    "`ConfigError`: a bad option or call raises one line that says what was expected.",
)
@pytest.mark.parametrize(("make", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_was_meant_is_said(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.promise(
    "Errors",
    "`ConfigError`: a bad option or call raises one line that says what was expected.",
)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SenderOptions(bucket_bytes=3), "SenderOptions: bucket_bytes is 3, and should be"),
        (lambda: SenderOptions(**as_any({"bucket_byte": 3})), "did you mean bucket_bytes?"),
        (lambda: SenderOptions(**as_any({"x": 3})), "x is no option; use policy, bucket_bytes, "),
        (lambda: SenderOptions(policy=as_any("dense")), "policy is 'dense'"),
        (lambda: SenderOptions(policy=as_any({"dense_above": 2})), "dense_above"),
        (lambda: ReceiverOptions(stall_timeout_s=0), "stall_timeout_s is 0"),
        (lambda: ReceiverOptions.model_validate({"kernels": "none"}), "kernels is 'none'"),
        (lambda: ReceiverOptions.model_validate_json("{"), "ReceiverOptions"),
        (lambda: Policy(dense_above=2.0), "dense_above is 2.0"),
        (lambda: setattr(SenderOptions(), "bucket_bytes", 1 << 20), "make others by model_copy"),
    ],
)
def test_bad_options_are_config_errors_of_a_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, ValidationError)


def test_options_are_typed_without_a_plugin() -> None:
    """`make types` looks at uses of them all over tests and examples."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert "plugins" not in tomllib.loads(pyproject.read_text())["tool"]["mypy"]


def failing_steps(count: int, callback: Callable[[SyncStats | DeltaSyncError], None] | None) -> int:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sender = WeightSender(ModuleSource(model), inprocess.Sender())
    hook = sync_after_step(optimizer, sender, callback=callback, timeout_s=0.1)
    for _ in range(count):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    hook.remove()
    sender.close()
    return hook.failures


@pytest.mark.promise(
    "All or nothing",
    "A failed sync is counted and kept in `last_error`; training continues.",
)
def test_syncs_that_fail_are_warned_of_but_not_each(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # not once a process only
        caplog.clear()
        assert failing_steps(50, None) == 50
        warnings = [r for r in caplog.records if r.name == "deltasync.sync.hook"]
        assert {record.levelno for record in warnings} == {logging.WARNING}
        assert 1 <= len(warnings) <= 10
        first = warnings[0].getMessage()
        assert "the sync after step 1 failed, 1 in all" in first
        assert NoReceivers.__name__ in first
        assert "\n" not in first


def test_a_callback_does_not_silence_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[object] = []
    failing_steps(3, heard.append)
    assert len(heard) == 3
    assert "the sync after step 1 failed" in caplog.records[0].getMessage()
