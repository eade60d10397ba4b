"""Ends of users that break a rule of their contract: `tests/test_contracts.py` runs this file.

Each class names the tests of the contract that must fail.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

from deltasync.testing.links import Ends
from deltasync.testing.transport import TransportContract
from deltasync.transports import inprocess
from deltasync.transports.base import Frame


class Lending(inprocess.Sender):
    """Lends receivers the payload of whoever sends."""

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        with self._lock:
            for peer in self._members:
                self._links[peer].frames.append(frame)
            self._changed.notify_all()


class Shouting(inprocess.Sender):
    """Tells all what is meant for some."""

    def tell(self, peers: Collection[int], header: bytes, *, timeout_s: float) -> None:
        super().tell(self._members | set(peers), header, timeout_s=timeout_s)


class Patient(inprocess.Sender):
    """Keeps peers that are late."""

    def drop(self, peer: int) -> None:
        """Do nothing."""


class _Link(TransportContract):
    sender: ClassVar[type[inprocess.Sender]]

    def ends(self, tmp_path: Path, max_payload_bytes: int) -> Ends:
        sender = self.sender(max_payload_bytes=max_payload_bytes)
        return Ends(lambda: sender, sender.receiver, crosses_processes=False)


class TestLending(_Link):
    sender = Lending
    fails = (
        "test_other_payloads_are_refused",
        "test_a_tensor_may_be_overwritten_once_sent",
        "test_the_next_buffer_leaves_what_receivers_read_alone",
    )


class TestShouting(_Link):
    sender, fails = Shouting, ("test_some_peers_are_told",)


class TestPatient(_Link):
    sender, fails = Patient, ("test_who_replies_late_is_dropped_and_others_go_on",)
