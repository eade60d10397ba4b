"""What is got wrong at first is told in a word: ends, options, a hook whose syncs fail."""

from __future__ import annotations

import logging
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
from deltasync.errors import ConfigError, NoReceivers
from deltasync.transports import collective, inprocess
from tests.worlds.links import Model, fleet

MODEL: Any = nn.Linear(2, 2)
LINK: Any = inprocess.Sender()
SOURCE, TARGET = ModuleSource(MODEL), ModuleTarget(MODEL)
ANY: Any = None
ODD = "a\udc80"  # as a name of a file that is not UTF-8

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "module as source": (lambda: WeightSender(MODEL, LINK), r"give ModuleSource\(module\)"),
    "address of sender": (
        lambda: WeightSender(SOURCE, as_any("/run/w.sock")),
        r"'/run/w.sock', an address: .*shared_memory.Sender\('/run/w.sock'\)",
    ),
    "other end of sender": (lambda: WeightSender(SOURCE, LINK.receiver()), "give a Sender"),
    "module as target": (
        lambda: WeightReceiver(MODEL, LINK.receiver()),
        r"give ModuleTarget\(module\)",
    ),
    "dict of options": (
        lambda: WeightSender(SOURCE, LINK, options=as_any({"bucket_bytes": 1 << 20})),
        r"options is a dict; give SenderOptions\(...\)",
    ),
    "sender as optimizer": (
        lambda: sync_after_step(as_any(WeightSender(SOURCE, LINK)), ANY),
        "optimizer is a WeightSender",
    ),
}


def as_any(value: object) -> Any:
    return value


MISTAKES |= {
    "a value": (lambda: SenderOptions(bucket_bytes=3), "SenderOptions: bucket_bytes is 3, and"),
    "a payload in which 32 bits do not count": (
        lambda: SenderOptions(bucket_bytes=1 << 31),
        "bucket_bytes is 2147483648, and should be less than",
    ),
    "such a payload accepted": (
        lambda: ReceiverOptions(max_payload_bytes=1 << 31),
        "max_payload_bytes is 2147483648, and should be less than",
    ),
    "a name": (lambda: SenderOptions(**as_any({"bucket_byte": 3})), "did you mean bucket_bytes?"),
    "no name": (
        lambda: SenderOptions(**as_any({"x": 3})),
        "x is no option; use bucket_bytes, max_inflight_bytes, ",
    ),
    "a word": (lambda: SenderOptions(wire_dtypes=as_any("int8")), "wire_dtypes is 'int8'"),
    "a choice": (
        lambda: SenderOptions(compression=as_any("gapp")),
        "compression is 'gapp', .*'none', .*'gap' or 'class'",
    ),
    "no time": (lambda: ReceiverOptions(stall_timeout_s=0), "stall_timeout_s is 0"),
    "no time of a call": (
        lambda: WeightSender(SOURCE, LINK).send_weights(timeout_s=math.nan),
        "timeout_s is nan: give 0 to",
    ),
    "no time of a hook": (
        lambda: sync_after_step(
            torch.optim.SGD(MODEL.parameters()), WeightSender(SOURCE, LINK), total_timeout_s=-1
        ),
        "total_timeout_s is -1",
    ),
    "odd stream": (lambda: SenderOptions(stream_id=ODD), "stream_id is"),
    "set later": (
        lambda: setattr(SenderOptions(), "bucket_bytes", 1 << 20),
        "make others by model_copy",
    ),
    "secret of text": (
        lambda: collective.Sender(secret=as_any("text")),
        "secret is a str: give bytes",
    ),
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


@pytest.mark.promise(
    "All or nothing",
    "A failed sync is counted and kept in `last_error`; training continues.",
)
def test_syncs_that_fail_are_warned_of_but_not_each(caplog: pytest.LogCaptureFixture) -> None:
    """Not once a process only; and a callback does not silence the warning."""
    heard: list[object] = []
    for callback in (None, heard.append):
        caplog.clear()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with WeightSender(ModuleSource(model), inprocess.Sender()) as sender:
            hook = sync_after_step(optimizer, sender, callback=callback, timeout_s=0.1)
            for _ in range(50):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        assert hook.failures == 50
        assert isinstance(hook.last_error, NoReceivers)
        warnings = [r for r in caplog.records if r.name == "deltasync.sync.hook"]
        assert {record.levelno for record in warnings} == {logging.WARNING}
        assert len(warnings) == 6  # after 1, 2, 4 ... 32
        first = warnings[0].getMessage()
        assert "the sync after step 1 failed, 1 in a row" in first
        assert NoReceivers.__name__ in first
        assert "\n" not in first
    assert len(heard) == 50
