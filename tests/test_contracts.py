"""The contract of transports finds an end that breaks it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltasync.testing.links import Ends, Link
from deltasync.testing.transport import TransportContract
from deltasync.transports import inprocess
from deltasync.transports.base import Frame


class Lending(inprocess.Sender):
    """Takes any payload, and lends the same memory again and again."""

    memory = torch.zeros(100_000, dtype=torch.uint8)

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        return self.memory[:num_bytes]

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        with self._lock:
            for peer in self._members:
                self._links[peer].frames.append(frame)
            self._changed.notify_all()


class _OfLending(TransportContract):
    def ends(self, tmp_path: Path) -> Ends:
        sender = Lending()
        return Ends(lambda: sender, sender.receiver, crosses_processes=False)


@pytest.mark.parametrize(
    "name",
    ["test_other_payloads_are_refused", "test_the_next_buffer_leaves_what_receivers_read_alone"],
)
def test_an_end_that_breaks_a_rule_is_found(name: str, tmp_path: Path) -> None:
    contract = _OfLending()
    with ExitStack() as stack:
        link = Link(contract.ends(tmp_path), stack)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            getattr(contract, name)(link)
