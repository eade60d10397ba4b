"""`deltasync relay` and `deltasync export`: from a live sender to a checkpoint."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync import ModuleSource, WeightSender
from deltasync.delta.bits import as_bits
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.files.checkpoint import Checkpoint
from deltasync.transports.address import Address
from tests.cli.command import refused, start, told
from tests.programs import Program
from tests.sync.harness import Model, random_model, step

pytestmark = pytest.mark.timeout(200)


@contextmanager
def sending(source: Model, address: str) -> Iterator[WeightSender]:
    """A trainer that sends again and again, in a thread."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            with suppress(DeltaSyncError):
                sender.wait_for_receivers(1, timeout_s=0.2)
                sender.send_weights(timeout_s=20)
            over.wait(0.05)

    with WeightSender(ModuleSource(source), Address.parse(address).sender()) as sender:
        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield sender
        finally:
            over.set()
            thread.join(60)


@contextmanager
def relaying(*words: str | Path) -> Iterator[Program]:
    with start("relay", *words, "--json") as process:
        yield process


def heard(process: Program, event: str) -> dict[str, Any]:
    """The next event of a kind."""
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError(process.stderr.read())


def assert_same(path: Path, source: Model) -> None:
    found = Checkpoint(path)
    for name, parameter in source.named_parameters():
        assert torch.equal(as_bits(found.tensor(name)), as_bits(parameter.data)), name


def test_a_live_sender_is_exported_through_a_relay(tmp_path: Path) -> None:
    source = random_model({"a": (40, 7), "b": (300,)}, 0)
    step(source, torch.Generator().manual_seed(0), 0.5)
    above, below = (f"shared_memory:{tmp_path / name}" for name in ("above", "below"))
    with sending(source, above), relaying("--connect", above, "--serve", below) as relay:
        assert heard(relay, "serving")["address"] == below
        heard(relay, "holds")
        for number, address in enumerate((above, below)):
            out = tmp_path / f"model{number}"
            found = told("export", "--connect", address, "--out", out)
            assert found["out"] == str(out)
            assert_same(out, source)
        assert heard(relay, "forwarded")["full_synced"] == 1
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(30) == 128 + signal.SIGTERM
        assert "Traceback" not in relay.stderr.read()


def test_a_relay_serves_on_a_network_with_a_secret(tmp_path: Path) -> None:
    source, secret = random_model({"a": (40, 7)}, 0), tmp_path / "secret"
    secret.write_text("of both\n")
    above = f"shared_memory:{tmp_path / 'above'}"
    with (
        sending(source, above),
        relaying(
            *("--connect", above, "--serve", "gloo://127.0.0.1:0", "--secret", secret)
        ) as relay,
    ):
        address = heard(relay, "serving")["address"]
        heard(relay, "holds")
        out = tmp_path / "model"
        told("export", "--connect", address, "--out", out, "--secret", secret)
        assert_same(out, source)
        relay.send_signal(signal.SIGINT)
        assert relay.wait(30) == 130


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--connect", "nowhere", "--out"), "is no address"),
        (("--connect", "gloo://host:1:2", "--out"), "is no address"),
        (("--connect", "gloo://host:1", "--timeout", "inf", "--out"), "--timeout"),
        (("--connect", "gloo://host:1", "--timeout", "1000001", "--out"), "--timeout"),
        (("--connect", "gloo://127.0.0.1:1", "--name", "x" * 257, "--out"), "engine"),
        (("--connect", "shared_memory:/none/here", "--timeout", "0.2", "--out"), "Timeout"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    assert problem in refused("export", *words, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_relay_refuses_to_feed_itself(tmp_path: Path) -> None:
    address = f"shared_memory:{tmp_path / 'socket'}"
    assert "cannot feed itself" in refused("relay", "--connect", address, "--serve", address)


def test_a_relay_says_where_it_cannot_listen(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        serve = f"gloo://127.0.0.1:{taken.getsockname()[1]}"
        above = f"shared_memory:{tmp_path / 'above'}"
        line = refused("relay", "--connect", above, "--serve", serve)
        assert "in use" in line


@pytest.mark.parametrize(
    "text",
    [
        "gloo://host:29500",
        "gloo://[::1]:0",
        "nccl://10.0.0.1:1",
        "shared_memory:/a b/c",
        "cuda_ipc:x",
    ],
)
def test_addresses_are_written_as_they_are_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "gloo", "gloo:", "gloo://", "gloo://h:99999", "tcp://h:1", "gloo://h:1/x", "gloo://u@h:1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        Address.parse(text)
