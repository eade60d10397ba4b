"""What no message can carry is refused by name at the end that has it, before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltasync import ModuleSource, ModuleTarget, SenderOptions, StoreSender, WeightReceiver
from deltasync.errors import ConfigError
from deltasync.transports import collective, inprocess
from deltasync.transports.address import Address
from tests.worlds.links import Model, fleet

ODD = "a\udc80"  # as a name of a file that is not UTF-8


def test_a_name_with_surrogates_is_refused_at_the_end_that_has_it(tmp_path: Path) -> None:
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
                made.sender.send_weights(timeout_s=10)
        made.wait(1)
        assert not serving.errors
    assert torch.equal(good.get_parameter("a"), torch.ones(3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stream_id": ODD}, "stream_id is"),
        ({"stream_id": "x" * 129}, "stream_id is"),
        ({"compression": "gapp"}, "compression is 'gapp', .*'none', .*'block' or 'class'"),
        ({"compression": 3}, "compression is 3, "),
    ],
)
def test_options_say_the_option_and_what_it_takes(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        SenderOptions(**options)  # type: ignore[arg-type]
    assert "literal[" not in str(refused.value)


@pytest.mark.parametrize("host", [f"h{ODD}", "a..b", "x" * 64])
def test_what_is_no_host_is_refused(host: str) -> None:
    for make in (
        lambda: collective.Sender(host),
        lambda: collective.Receiver(host, 1),
        Address.parse(f"gloo://{host}:1").sender,
    ):
        with pytest.raises(ConfigError, match="is no name or address of a host"):
            make()


def test_a_secret_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="secret is a str: give bytes"):
        collective.Sender(secret="text")  # type: ignore[arg-type]
