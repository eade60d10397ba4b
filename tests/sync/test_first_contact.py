"""What is got wrong at first is told in a word: ends, options, a hook whose syncs fail."""

from __future__ import annotations

import math
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
    ReceiverOptions,
    SenderOptions,
    StoreSender,
    WeightReceiver,
    WeightSender,
    sync_after_step,
)
from deltasync.errors import ConfigError
from deltasync.transports import inprocess
from tests.worlds.links import Model, fleet

MODEL: Any = nn.Linear(2, 2)
LINK: Any = inprocess.Sender()
SOURCE, TARGET = ModuleSource(MODEL), ModuleTarget(MODEL)
ODD = "a\udc80"  # as a name of a file that is not UTF-8

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "module as source": (lambda: WeightSender(MODEL, LINK), r"give ModuleSource\(module\)"),
    "address of sender": (
        lambda: WeightSender(SOURCE, as_any("/run/w.sock")),
        r"'/run/w.sock', an address: .*shared_memory.Sender\('/run/w.sock'\)",
    ),
    "module as target": (
        lambda: WeightReceiver(MODEL, LINK.receiver()),
        r"give ModuleTarget\(module\)",
    ),
    "dict of options": (
        lambda: WeightSender(SOURCE, LINK, options=as_any({"bucket_bytes": 1 << 20})),
        r"options is a dict; give SenderOptions\(...\)",
    ),
}


def as_any(value: object) -> Any:
    return value


def hook(**settings: Any) -> object:
    given = {"optimizer": torch.optim.SGD(MODEL.parameters())} | settings
    return sync_after_step(sender=WeightSender(SOURCE, LINK), **given)


MISTAKES |= {
    "a value": (lambda: SenderOptions(bucket_bytes=3), "SenderOptions: bucket_bytes is 3, and"),
    "a name": (lambda: SenderOptions(**as_any({"bucket_byte": 3})), "did you mean bucket_bytes?"),
    "a choice": (
        lambda: SenderOptions(compression=as_any("gapp")),
        "compression is 'gapp', .*'none', .*'gap' or 'class'",
    ),
    "no time": (lambda: ReceiverOptions(stall_timeout_s=0), "stall_timeout_s is 0"),
    "no time of a call": (
        lambda: WeightSender(SOURCE, LINK).send_weights(timeout_s=math.nan),
        "timeout_s is nan: give 0 to",
    ),
    "no time of a hook": (lambda: hook(total_timeout_s=-1), "total_timeout_s is -1"),
    "no steps of a hook": (lambda: hook(every=0), "every is 0"),
    "no way out of a hook": (lambda: hook(on_error="ignore"), "on_error is 'ignore'"),
    "no pace of a hook": (lambda: hook(on_busy="later"), "on_busy is 'later'"),
    "no optimizer": (lambda: hook(optimizer=[]), "no optimizer"),
    "odd stream": (lambda: SenderOptions(stream_id=ODD), "stream_id is"),
}


@pytest.mark.promise(
    "Errors",
    "`ConfigError`: a bad option or call raises one line that says what was expected.",
)
@pytest.mark.parametrize(("make", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_was_meant_is_said_in_a_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert "literal[" not in str(caught.value)
    assert not isinstance(caught.value, ValidationError)


def test_a_name_with_surrogates_is_refused_at_the_end_that_has_it(tmp_path: Path) -> None:
    """No message can carry it."""
    odd, good = Model({ODD: torch.ones(3)}), Model({"a": torch.ones(3)})
    for publish in (
        StoreSender(ModuleSource(odd), tmp_path / "store").publish,
        lambda: WeightReceiver(ModuleTarget(odd), inprocess.Sender().receiver()).receive_weights(),
    ):
        with pytest.raises(ConfigError, match="its name is no Unicode"):
            publish()
    with fleet(odd) as made:
        serving = made.add(good)
        made.wait(1)
        for _ in range(2):  # the trainer's fault: the engine is not refused, and waits on
            with pytest.raises(ConfigError, match="its name is no Unicode"):
                made.sender.send_weights(timeout_s=60)
        made.wait(1)
        assert not serving.errors
    assert torch.equal(good.get_parameter("a"), torch.ones(3))
