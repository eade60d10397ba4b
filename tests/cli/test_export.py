"""`deltasync export`: from a live sender to a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from deltasync import ModuleSource, WeightSender
from deltasync.delta.bits import as_bits
from deltasync.errors import DeltaSyncError
from deltasync.files.checkpoint import Checkpoint
from deltasync.transports import collective, shared_memory
from deltasync.transports.address import Address
from deltasync.transports.base import SendTransport
from tests.cli.command import refused, told
from tests.worlds.links import Model, random_model, step


@contextmanager
def sending(source: Model, link: SendTransport) -> Iterator[str]:
    """A trainer that sends again and again, in a thread. Yields its address."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            with suppress(DeltaSyncError):
                sender.wait_for_receivers(1, timeout_s=0.2)
                sender.send_weights(timeout_s=20)
            over.wait(0.05)

    with WeightSender(ModuleSource(source), link) as sender:
        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield str(Address.of(link))
        finally:
            over.set()
            thread.join(60)


def assert_same(path: Path, source: Model) -> None:
    found = Checkpoint(path)
    for name, parameter in source.named_parameters():
        assert torch.equal(as_bits(found.tensor(name)), as_bits(parameter.data)), name


def test_a_live_sender_is_exported(tmp_path: Path) -> None:
    source = random_model({"a": (40, 7), "b": (300,)}, 0)
    step(source, torch.Generator().manual_seed(0), 0.5)
    address, out = f"shared_memory:{tmp_path / 'socket'}", tmp_path / "model"
    with sending(source, shared_memory.Sender(tmp_path / "socket")):
        assert told("export", address, "--out", out)["out"] == str(out)
    assert_same(out, source)


def test_a_live_sender_is_exported_over_a_network_with_a_secret(tmp_path: Path) -> None:
    source, secret = random_model({"a": (40, 7)}, 0), tmp_path / "secret"
    secret.write_text("of both\n")
    with sending(source, collective.Sender(secret=b"of both")) as address:
        out = tmp_path / "model"
        told("export", address, "--out", out, "--secret", secret)
    assert_same(out, source)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("nowhere", "--out"), "is no address"),
        (("gloo://host:1:2", "--out"), "is no address"),
        (("gloo://host:1", "--timeout", "inf", "--out"), "--timeout"),
        (("gloo://host:1", "--timeout", "1000001", "--out"), "--timeout"),
        (("gloo://127.0.0.1:1", "--name", "x" * 257, "--out"), "engine"),
        (("shared_memory:/none/here", "--timeout", "0.2", "--out"), "Timeout"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    assert problem in refused("export", *words, tmp_path / "model")
    assert not list(tmp_path.iterdir())


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
